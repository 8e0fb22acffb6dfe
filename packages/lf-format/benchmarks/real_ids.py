"""Real token ids for size measurements: source code and documentation of this machine under an own BPE.

    python benchmarks/real_ids.py OUT --megabytes 256 --roots FOLDER ...

writes OUT/tokenizer.json and OUT/docs.npz (input_ids: one uint16 array a file). Unpacked documentation packages
(`apt-get download linux-doc-6.1 python3.11-doc rust-doc erlang-doc`, `dpkg -x`) are good roots.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

VOCAB = 32_000
ROOTS = ("/usr/share/doc", "/usr/share", "/usr/lib", "/usr/include")
SUFFIXES = {".py", ".md", ".rst", ".txt", ".html", ".h", ".pyi", ".hpp", ".c", ".cpp", ".pm", ".pl", ".tex"}
DEFAULT_ROOTS = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *ROOTS]
TRAINED_ON = 16  # every 16th text trains the BPE


def texts(roots: list[str]) -> Iterator[str]:
    """UTF-8 files of SUFFIXES below `roots`, in path order, each content once."""
    seen: set[int] = set()
    for root in dict.fromkeys(roots):
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                if path.suffix in SUFFIXES and path.is_file() and 200 < path.stat().st_size < 1 << 20:
                    try:
                        text = path.read_text("utf-8")
                    except (UnicodeDecodeError, OSError):
                        continue
                    if hash(text) not in seen:
                        seen.add(hash(text))
                        yield text


def build(output: Path, megabytes: int, roots: list[str]) -> int:
    """Trains the BPE on a part of the texts and stores ids until there are enough; bytes of ids stored."""
    output.mkdir(parents=True, exist_ok=True)
    wanted = megabytes * 1_000_000 // 2
    documents, size = [], 0
    for text in texts(roots):
        documents.append(text)
        size += len(text)
        if size > wanted * 5:
            break
    np.random.default_rng(0).shuffle(documents)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents[: max(len(documents) // TRAINED_ON, 1)], trainer)
    tokenizer.save(str(output / "tokenizer.json"))
    rows: list[np.ndarray] = []
    tokens = 0
    for at in range(0, len(documents), 256):
        for encoding in tokenizer.encode_batch(documents[at : at + 256]):
            rows.append(np.array(encoding.ids, np.uint16))
            tokens += len(encoding.ids)
        if tokens >= wanted:
            break
    packed = np.empty(len(rows), object)
    packed[:] = rows
    np.savez(output / "docs.npz", input_ids=packed)
    print(f"{len(rows)} documents, {tokens} tokens, {2 * tokens} bytes of ids", file=sys.stderr)
    return 2 * tokens


def main() -> int:
    """Returns 1 when there is less text than asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--megabytes", type=int, default=272)
    parser.add_argument("--roots", nargs="+", default=DEFAULT_ROOTS)
    args = parser.parse_args()
    return int(build(args.output, args.megabytes, args.roots) < args.megabytes * 1_000_000)


if __name__ == "__main__":
    sys.exit(main())
