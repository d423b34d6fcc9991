"""The sha256 of everything that decides what the native modules do: src/ and CMakeLists.txt.

A GPU run records it, so that one can tell whether the kernels in the tree are the ones that were tested. For each file,
in the order of their paths: the relative path, NUL, the bytes, NUL. Knows nothing of what it hashes.

    source_digest.py               prints the digest
    source_digest.py --cc FILE     defines jax_flash2::kSourceDigest in FILE, left untouched when it says so already
"""

import hashlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def source_digest(root: pathlib.Path = ROOT) -> str:
    files = [root / "CMakeLists.txt", *(p for p in (root / "src").rglob("*") if p.is_file())]
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_if_different(path: pathlib.Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--cc":
        definition = f'const char jax_flash2::kSourceDigest[] = "{source_digest()}";\n'
        write_if_different(pathlib.Path(sys.argv[2]), '#include "ffi/source_digest.h"\n' + definition)
    else:
        print(source_digest())
