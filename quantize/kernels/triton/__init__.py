"""Our GPU kernels for quantized linears, in Triton; without a GPU they run in its interpreter, for tests."""
