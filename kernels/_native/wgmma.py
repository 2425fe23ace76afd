"""The matrix instructions of Hopper's warpgroups as CUDA C++ functions, whose operands the instruction wants by name."""

from __future__ import annotations


def instruction(name: str, columns: int, *, held: bool, across: bool, a_across: bool = False) -> str:
    """``void name(float (&o)[columns / 2], a, b, keep)``: o = a·b (+ o if keep) of 64 rows, ``columns`` columns and 16 products, in bf16.

    a: a descriptor of shared memory, its rows along the lines if ``a_across``, or with ``held`` four registers; b: a descriptor, its
    columns along the lines if ``across``.
    """
    floats, parts = columns // 2, 4 if held else 1
    kind, letter = ("unsigned", "r") if held else ("unsigned long long", "l")
    a = [f"a{i}" for i in range(parts)]
    parameters, inputs = ", ".join(f"{kind} {x}" for x in a), ", ".join(f'"{letter}"({x})' for x in a)
    outputs, operands = (", ".join(template.format(i) for i in range(floats)) for template in ('"+f"(o[{}])', "%{}"))
    left = ", ".join(f"%{floats + i}" for i in range(parts))
    left = f"{{{left}}}" if held else left
    transposed = f"{int(across)}" if held else f"{int(a_across)}, {int(across)}"
    return (
        f"__device__ __forceinline__ void {name}(float (&o)[{floats}], {parameters}, unsigned long long b, int keep) {{\n"
        f'asm volatile("{{\\n.reg .pred keep;\\nsetp.ne.b32 keep, %{floats + parts + 1}, 0;\\n"\n'
        f'"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 {{{operands}}}, {left}, %{floats + parts}, keep, 1, 1, '
        f'{transposed};\\n}}" : {outputs} : {inputs}, "l"(b), "r"(keep));\n}}\n'
    )
