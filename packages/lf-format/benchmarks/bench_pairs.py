"""JSONL + JPEG pairs into a training format: preprocess_pairs beside the loops people write, in one run.

    python benchmarks/bench_pairs.py --json OUT [--pairs 200] [--repeat 5] [--size 480 640]

The pairs are made here: photo-like noise (1/f spectrum, correlated colours) as JPEG of quality 90, and a text of about
500 characters each. Rates are pairs per second of CPU time of all threads, so per core, and of wall time; repeats are
interleaved and outputs are removed outside of the time. Peers do per sample what the articles describe (PIL decode,
RGB, 224 x 224, float32 tensor, ids and mask as int64, one .pt file), with torchvision's transforms and with the same
torch operations by hand, and the leaner form with uint8 arrays in one .npz a sample. Rows without their library are
named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import lf_format as lff

SIZE, MAX_LEN = (224, 224), 512
Action = Callable[[Path], object]


@dataclass(frozen=True)
class Row:
    """One case: pairs/s by CPU time (median, lowest, highest) and wall time; median ratios to the first case."""

    name: str
    cpu: float
    lowest: float
    highest: float
    wall: float
    cpu_ratio: float
    wall_ratio: float


def photo(seed: int, size: tuple[int, int]) -> Image.Image:
    """Noise with the spectrum of photos."""
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(size[0])[:, None], np.fft.rfftfreq(size[1])[None])
    frequency[0, 0] = 1
    spectrum = np.fft.rfft2(random.standard_normal((3, *size)), axes=(1, 2)) / frequency**1.5
    planes = np.fft.irfft2(spectrum, size, axes=(1, 2))
    mixed = 0.8 * planes[:1] + 0.3 * planes
    pixels = 120 + 50 * (mixed - mixed.mean()) / mixed.std()
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8).transpose(1, 2, 0))


def write_pairs(folder: Path, pairs: int, size: tuple[int, int]) -> Path:
    """`pairs` JPEG files and the .jsonl that names them."""
    words = ["pick", "the", "pear", "from", "counter", "and", "place", "it", "in", "a", "plate"]
    random = np.random.default_rng(0)
    lines = []
    for k in range(pairs):
        photo(k, size).save(folder / f"{k}.jpg", quality=90)
        lines.append(json.dumps({"text": " ".join(random.choice(words, 100))[:500], "image": f"{k}.jpg"}))
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def decoded(path: Path) -> Iterator[tuple[str, Image.Image]]:
    """Text and RGB image of every line."""
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            yield row["text"], Image.open(path.parent / row["image"]).convert("RGB")


def numpy_loop(path: Path, folder: Path) -> None:
    """uint8 pixels, byte ids and mask, one .npz a sample."""
    for k, (text, image) in enumerate(decoded(path)):
        pixels = np.asarray(image.resize(SIZE[::-1], Image.Resampling.BILINEAR))
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        np.savez(folder / f"{k}.npz", image=pixels, input_ids=ids, attention_mask=np.ones(len(ids), bool))


def torch_loop(path: Path, folder: Path, transform: Callable[[Any], Any]) -> None:
    """What the articles describe: float32 pixels, int64 ids and mask, one .pt a sample."""
    import torch

    for k, (text, image) in enumerate(decoded(path)):
        ids = torch.tensor(list(text.encode()))
        sample = {"image": transform(image), "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        torch.save(sample, folder / f"{k}.pt")


def torchvision_transform() -> Callable[[Any], Any]:
    """Resize and ToTensor of torchvision."""
    from torchvision import transforms

    transform: Callable[[Any], Any] = transforms.Compose([transforms.Resize(SIZE), transforms.ToTensor()])
    return transform


def torch_transform() -> Callable[[Any], Any]:
    """The same operations by hand."""
    import torch

    def transform(image: Any) -> Any:
        pixels = np.array(image.resize(SIZE[::-1], Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous().to(torch.float32).div(255)

    return transform


def cases(path: Path) -> Iterator[tuple[str, Action]]:
    """Rows in the order of the table; those without their library are named and left out."""
    made = {"torchvision Resize + ToTensor, .pt": torchvision_transform, "PIL + torch, .pt": torch_transform}
    for name, make in made.items():
        try:
            transform = make()
        except (ImportError, RuntimeError) as error:
            print(f"no row {name!r}: {type(error).__name__}: {error}")
            continue
        yield name, lambda folder, transform=transform: torch_loop(path, folder, transform)
    yield "PIL + numpy, .npz", lambda folder: numpy_loop(path, folder)
    for workers in (1, 2):
        options: dict[str, Any] = {"image_size": SIZE, "max_len": MAX_LEN, "num_workers": workers}
        name = f"preprocess_pairs, {workers} worker{'s' * (workers > 1)}"
        yield name, lambda folder, options=options: lff.preprocess_pairs(path, folder, **options)


def measure(actions: dict[str, Action], pairs: int, repeat: int) -> list[Row]:
    """Interleaved repeats; ratios are medians over them."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in actions}
    for _ in range(repeat):
        for name, action in actions.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time(), time.perf_counter()
                action(Path(folder))
                cpu, wall = time.process_time() - started[0], time.perf_counter() - started[1]
            seen[name].append((pairs / cpu, pairs / wall))
    first = next(iter(seen.values()))
    rows = []
    for name, rates in seen.items():
        cpu, wall = zip(*rates, strict=True)
        ratios = [statistics.median(a[k] / b[k] for a, b in zip(rates, first, strict=True)) for k in (0, 1)]
        rows.append(Row(name, statistics.median(cpu), min(cpu), max(cpu), statistics.median(wall), *ratios))
    return rows


def main() -> None:
    """Prints a Markdown table and writes the JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--size", type=int, nargs=2, default=(480, 640))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = write_pairs(Path(name), args.pairs, tuple(args.size))
        rows = measure(dict(cases(path)), args.pairs, args.repeat)
    print("| case | pairs/s of a core, median (lowest - highest) | ratio | pairs/s wall | ratio |")
    print("|---|---|---|---|---|")
    for r in rows:
        spread = f"{r.cpu:.0f} ({r.lowest:.0f} - {r.highest:.0f})"
        print(f"| {r.name} | {spread} | {r.cpu_ratio:.2f} | {r.wall:.0f} | {r.wall_ratio:.2f} |")
    machine = {"machine": platform.machine(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    report: dict[str, Any] = {"version": 1, "machine": machine | {"python": platform.python_version()}}
    report |= {"versions": {name: version(name) for name in ("numpy", "pillow", "xxhash")}}
    report |= {"pairs": args.pairs, "size": list(args.size), "rows": [asdict(r) for r in rows]}
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
