"""A quantized checkpoint's manifest as people read it: one line per module, and the whole in a few lines."""

from collections import Counter

from rich.table import Table

from quantize.manifest import Manifest
from quantize.scheme import PER_CHANNEL


def module_table(manifest: Manifest) -> Table:
    """Bits, group, relative error, fallbacks, dead columns and bytes of every module."""
    table = Table(
        "module", "bits", "group", "relative error", "of", "fallback", "dead columns", "bytes", title="modules"
    )
    for module in manifest.modules:
        table.add_row(
            module.name,
            str(module.bits),
            _group(module.group_size),
            "" if module.relative_error is None else f"{module.relative_error:.2e}",
            module.error_of,
            module.fallback or "",
            str(module.dead_columns or ""),
            f"{module.bytes:,}",
        )
    return table


def manifest_lines(manifest: Manifest) -> list[str]:
    """What was done, how it is stored, what it costs, and everything that went otherwise than asked."""
    kinds = Counter((module.bits, module.group_size, module.symmetric) for module in manifest.modules)
    stored = ", ".join(
        f"{count} modules at {bits} bits, {'one scale per output' if group == PER_CHANNEL else f'groups of {group}'}, "
        f"{'symmetric' if symmetric else 'asymmetric'}"
        for (bits, group, symmetric), count in kinds.items()
    )
    lines = [
        f"method    {manifest.recipe['method']}: {stored}",
        f"size      {manifest.bytes_before / 1e6:,.1f} MB to {manifest.bytes_after / 1e6:,.1f} MB",
        f"weights   {manifest.bits_per_weight:.2f} bits per quantized weight, scales included",
        f"coverage  {manifest.coverage['packed']} of {manifest.coverage['expected']} modules",
    ]
    if manifest.calibration is not None:
        text = manifest.calibration
        lines.append(
            f"calibrated on {text['samples']} windows of {text['sequence_length']} tokens from {text['source']}"
        )
    compared = [(module.relative_error, module) for module in manifest.modules if module.relative_error is not None]
    if compared:
        error, worst = max(compared, key=lambda pair: pair[0])
        lines.append(f"worst     {worst.name}: relative error {error:.2e} of its {worst.error_of}")
    fallbacks = Counter(module.fallback for module in manifest.modules if module.fallback)
    lines += [f"fallback  {count} modules: {why}" for why, count in fallbacks.items()]
    return lines + [f"note      {note}" for note in manifest.notes]


def _group(group_size: int) -> str:
    return "per output" if group_size == PER_CHANNEL else str(group_size)
