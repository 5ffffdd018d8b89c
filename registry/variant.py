"""A campaign folder and the variants in it, as records.

Everything that was measured lies in files (the checkpoint's manifest, quality/, speed/, comparison.json); a record
holds those documents as they are and gives the few views that tracking, releases and reports share: the flat metrics,
the flat recipe, and the digest that says which variant this is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.speed.validity import doubts_of
from registry.errors import RegistryError
from registry.json_files import document_digest, read_json

Document = Mapping[str, Any]

# What makes two measurements measurements of the same variant: its bytes and its numerics.
VARIANT_IDENTITY = ("weights_digest", "tokenizer_digest", "chat_template_digest", "compute", "dtype", "kv_dtype")


def variant_key(identity: Document) -> str:
    """Which variant this is: sha256 over its weights, tokenizer, chat template and numerics."""
    if not identity.get("weights_digest"):
        raise RegistryError("identity has no weights_digest: evaluate the checkpoint again with this version")
    return document_digest({name: identity.get(name) for name in VARIANT_IDENTITY})


@dataclass(frozen=True)
class VariantRecord:
    """One variant of a campaign. A document is None where its stage has not run.

    The folders hold the evidence files beside quality.json and speed.json.
    """

    name: str
    quality_folder: Path
    speed_folder: Path
    comparison_file: Path | None = None
    checkpoint: Path | None = None
    manifest: Document | None = None
    quality: Document | None = None
    speed: Document | None = None
    comparison: Document | None = None

    @classmethod
    def read(cls, directory: Path, name: str | None = None, checkpoint: Path | None = None) -> VariantRecord:
        """The variant in `directory`. Its checkpoint, unless given, is `directory`/checkpoint, or, in a campaign, the
        one of the same name in the campaign's checkpoints/."""
        if not directory.is_dir():
            raise RegistryError(f"{directory}: no such variant folder")
        if checkpoint is None:
            places = (directory / "checkpoint", directory.absolute().parent.parent / "checkpoints" / directory.name)
            checkpoint = next((place for place in places if place.is_dir()), None)
        record = cls.of_results(name or directory.name, checkpoint, directory / "quality", directory / "speed")
        comparison = directory / "comparison.json"
        if not comparison.exists():
            return record
        return replace(record, comparison_file=comparison, comparison=read_json(comparison))

    @classmethod
    def of_results(cls, name: str, checkpoint: Path | None, quality: Path, speed: Path | None) -> VariantRecord:
        """A variant whose results lie in folders of their own; it has no comparison."""
        speed_folder = speed if speed is not None else quality.parent / "speed"
        return cls(
            name=name,
            quality_folder=quality,
            speed_folder=speed_folder,
            checkpoint=checkpoint,
            manifest=_read_if_there(checkpoint / "quantgate.json") if checkpoint else None,
            quality=_read_if_there(quality / "quality.json"),
            speed=_read_if_there(speed_folder / "speed.json") if speed is not None else None,
        )

    @property
    def identity(self) -> Document:
        """Digests and numerics of the variant, from the evaluation, else from the speed measurement."""
        if self.quality is not None:
            return dict(self.quality.get("identity") or {})
        if self.speed is not None:
            return dict(self.speed.get("candidate") or {})
        return {}

    @property
    def key(self) -> str:
        try:
            return variant_key(self.identity)
        except RegistryError as error:
            raise RegistryError(f"variant {self.name} ({self.quality_folder}): {error}") from None

    @property
    def other_numerics(self) -> list[str]:
        """What is computed or kept in another way than the model's own dtype, as people read it: a8, KV int8."""
        compute, kept = self.identity.get("compute"), self.identity.get("kv_dtype")
        said = [] if compute in (None, "a16") else [str(compute)]
        return said if kept in (None, self.identity.get("dtype")) else [*said, f"KV {kept}"]

    @property
    def doubts(self) -> dict[str, str]:
        """What speaks against believing the speed measurement, by check."""
        return doubts_of((self.speed or {}).get("validity") or {})

    @property
    def verdict(self) -> str | None:
        return None if self.comparison is None else str(self.comparison["verdict"])

    def recipe(self) -> dict[str, Any]:
        """The recipe, flat: `recipe.bits`, `recipe.overrides.model.layers.0.bits`; empty for the baseline."""
        return {} if self.manifest is None else flat(self.manifest.get("recipe") or {}, "recipe")

    def metrics(self) -> dict[str, float]:
        """Every number under its flat name: the quantizer's, the evaluation's, the speed's, the comparison's."""
        merged: dict[str, float] = {}
        if self.manifest is not None:
            merged |= quantize_metrics(self.manifest)
        for document in (self.quality, self.speed, self.comparison):
            if document is not None:
                merged |= {name: float(value) for name, value in (document.get("metrics") or {}).items()}
        return merged


@dataclass(frozen=True)
class CampaignRecord:
    """One baseline and its candidates, in the order of the campaign."""

    name: str
    model: str
    directory: Path
    baseline: VariantRecord
    candidates: tuple[VariantRecord, ...]

    @classmethod
    def read(
        cls,
        directory: Path,
        *,
        name: str | None = None,
        baseline: str = "baseline",
        model: str | None = None,
        checkpoints: Mapping[str, Path] | None = None,
    ) -> CampaignRecord:
        """The campaign in `directory`, whose variants/ folder holds one folder per variant.

        checkpoints: where each variant's checkpoint lies, in the order to show them; without it, the variants' folders
        in alphabetical order. model: what the baseline is called in MLflow; its checkpoint folder's name unless said.
        """
        if checkpoints is not None:
            paths: dict[str, Path | None] = dict(checkpoints)
        else:
            folders = sorted(path for path in (directory / "variants").glob("*") if path.is_dir())
            paths = {path.name: None for path in folders if not path.name.endswith(".partial")}
        if baseline not in paths:
            known = ", ".join(paths) or "none"
            raise RegistryError(f"{directory}: baseline '{baseline}' is not among its variants ({known})")
        records = {each: VariantRecord.read(directory / "variants" / each, each, paths[each]) for each in paths}
        place = records[baseline].checkpoint
        return cls(
            name=name or directory.name,
            model=model or (place.resolve().name if place is not None else directory.name),
            directory=directory,
            baseline=records.pop(baseline),
            candidates=tuple(records.values()),
        )

    @property
    def variants(self) -> tuple[VariantRecord, ...]:
        return (self.baseline, *self.candidates)


def quantize_metrics(manifest: Document) -> dict[str, float]:
    """`quantize.*` and `memory.checkpoint_bytes` from a checkpoint's manifest."""
    modules = list(manifest.get("modules") or [])
    errors = [float(m["relative_error"]) for m in modules if m.get("relative_error") is not None]
    metrics: dict[str, float] = {
        "quantize.modules": len(modules),
        "quantize.fallbacks": sum(1 for m in modules if m.get("fallback")),
        "quantize.dead_columns": sum(int(m.get("dead_columns") or 0) for m in modules),
        "quantize.clipped_scales": sum(int(m.get("clipped_scales") or 0) for m in modules),
    }
    if errors:
        metrics |= {
            "quantize.relative_error.mean": sum(errors) / len(errors),
            "quantize.relative_error.max": max(errors),
        }
    for name, source in (("quantize.bits_per_weight", "bits_per_weight"), ("quantize.seconds", "seconds")):
        if manifest.get(source) is not None:
            metrics[name] = float(manifest[source])
    if manifest.get("bytes_after"):
        metrics["memory.checkpoint_bytes"] = float(manifest["bytes_after"])
        if manifest.get("bytes_before"):
            metrics["memory.checkpoint_bytes.ratio"] = float(manifest["bytes_after"]) / float(manifest["bytes_before"])
    return {name: float(value) for name, value in metrics.items()}


def flat(document: Document, prefix: str) -> dict[str, Any]:
    """Nested mappings as one level of dotted names; lists stay whole."""
    flattened: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flattened |= flat(value, f"{prefix}.{name}")
        else:
            flattened[f"{prefix}.{name}"] = value
    return flattened


def _read_if_there(path: Path) -> Document | None:
    return read_json(path) if path.exists() else None
