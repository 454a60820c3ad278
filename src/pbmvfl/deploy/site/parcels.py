"""Small zip files that organisations send each other: exact names, bounded sizes, read in memory, never unpacked."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from pbmvfl._files import not_written
from pbmvfl.errors import FederationError

#: Of a parcel, and of each file in it, in bytes. Certificates and keys have about 2,000.
LARGEST = 1_000_000
LARGEST_MEMBER = 250_000
#: Zip files carry dates; these do not, so that the same content is the same bytes.
_NO_DATE = (1980, 1, 1, 0, 0, 0)


def write_parcel(path: Path, members: Mapping[str, bytes]) -> None:
    """A zip file with these members and nothing about the machine that made it."""
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as parcel:
            for name, content in members.items():
                parcel.writestr(zipfile.ZipInfo(name, _NO_DATE), content, zipfile.ZIP_DEFLATED)
    except OSError as error:
        raise not_written(path, error) from error


def read_parcel(path: Path, names: set[str]) -> dict[str, bytes]:
    """The members of a zip file that somebody sent; one with any other member is refused."""
    try:
        if path.stat().st_size > LARGEST:
            raise FederationError(f"{path} has more than {LARGEST:,} bytes; it is no parcel of a federation")
        with zipfile.ZipFile(path) as parcel:
            infos = parcel.infolist()
            found = [info.filename for info in infos]
            if len(found) != len(names) or set(found) != names:
                raise FederationError(
                    f"{path} has {len(found)} files; permitted: exactly {', '.join(sorted(names))}; ask for it again"
                )
            for info in infos:
                if info.file_size > LARGEST_MEMBER or info.flag_bits & 1:
                    raise FederationError(f"{path}: {info.filename} is too large, or has a password; ask for it again")
            return {info.filename: _read(parcel, info) for info in infos}
    except OSError as error:
        raise FederationError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise FederationError(f"{path} is no zip file, or a damaged one: {error}; ask for it again") from error


def _read(parcel: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with parcel.open(info) as member:
        # Whatever the header says of its size.
        content = member.read(LARGEST_MEMBER + 1)
    if len(content) > LARGEST_MEMBER:
        raise FederationError(f"{info.filename} is larger than it says; ask for it again")
    return content
