"""Compiles Triton kernels for GPUs that are not here, down to machine code, and says what each takes.

The one idea: the interpreter runs Python, so it passes code that the compiler refuses; and the assembler that comes
with Triton counts registers spilled to memory, which no interpreter shows. It runs as a script, in a process where
TRITON_INTERPRET is off: python tests/triton_for_gpu.py MODULE:FUNCTION, where the function yields `Case`s.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPABILITIES = (80, 90)


@dataclass(frozen=True)
class Case:
    """`types`: a kernel's arguments, as Triton's signatures say them ("*bf16", "i32"); those in `constants` are
    compiled in. All pointers and the numbers named in `multiples` are multiples of 16, as they are in practice."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    multiples: tuple[str, ...] = ()


def compiled(case: Case, capability: int) -> str:
    """One line: the kernel, the GPU, registers, bytes of stack, tensor-core instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    types = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    aligned = [name for name in names if types[name].startswith("*") or name in case.multiples]
    source = ASTSource(
        fn=case.kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()

        def dump(what: str) -> str:
            return subprocess.run([cuobjdump, what, file.name], capture_output=True, text=True, check=True).stdout

        usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("-res-usage"))
        products = len(re.findall(r"\b(?:HMMA|HGMMA|IMMA|IGMMA)\b", dump("-sass")))
    assert usage is not None
    return f"{case.kernel.__name__} sm_{capability} registers={usage[1]} stack={usage[2]} products={products}"


def compile_elsewhere(where: str, cache: Path) -> Iterable[dict[str, str]]:
    """What `where` (MODULE:FUNCTION) yields, compiled in a process of its own: a mapping per kernel and GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    root = Path(__file__).parent.parent
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, __file__, where], capture_output=True, text=True, env=environment, cwd=root)
    assert ran.returncode == 0, ran.stderr
    for line in ran.stdout.splitlines():
        kernel, gpu, *counts = line.split()
        yield {"kernel": kernel, "gpu": gpu, **dict(count.split("=") for count in counts)}


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    for case in getattr(importlib.import_module(module), function)():
        for capability in CAPABILITIES:
            print(compiled(case, capability), flush=True)
