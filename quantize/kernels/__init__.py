"""Ways to multiply activations with a quantized weight.

A kernel is a module that owns the weight's tensors in the layout that it computes on: `kernel(x [M, K]) -> [M, N]`, in
the dtype of x, and has a `name`. `reference` defines the result, `choose` picks a kernel.
"""
