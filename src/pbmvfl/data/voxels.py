"""ModelNet10 as twelve depth pictures per object, so that six or twelve parties each see it from another side.

Grids are 30 x 30 x 30 with axis 2 up, the object inside the middle 24 cells. Cameras stand on a ring, 30 degrees
apart and 30 degrees above the horizon, and look at the centre without perspective. A picture is 32 x 32 uint8: 0 is
background, 55 to 255 is surface, brighter is nearer.

Legend: V views, P pixels of a picture, C cells of a grid, S sub-points of a cell.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pbmvfl.data import sources
from pbmvfl.errors import DataError

Grids = npt.NDArray[np.uint8]
Views = npt.NDArray[np.uint8]

MODELNET10_CLASSES = (
    "bathtub", "bed", "chair", "desk", "dresser", "monitor", "night_stand", "sofa", "table", "toilet",
)  # fmt: skip
MODELNET10_COUNTS = {
    "train": (106, 515, 889, 200, 200, 465, 200, 680, 392, 344),
    "test": (50, 100, 100, 86, 86, 100, 86, 100, 100, 100),
}

NUM_VIEWS = 12
GRID = 30
PICTURE = 32
_OBJECT = 24  # cells along the object's longest side; the rest is margin
_ELEVATION = np.deg2rad(30.0)
_HALF_WIDTH = 0.5 * GRID * 1.25  # of a picture, in cells: the object's box fits, but for its extreme corners
_DEPTH = 26.0  # the largest distance of a cell from the centre, in cells (half the grid's diagonal, rounded up)
#: Part of the name of rendered files: raise it when rendering changes, and old files are not found any more.
_RENDERING = 1


@cache
def _projection() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the pixel (numbered through all views) and the brightness of every view, cell and sub-point.

    Each cell is drawn as 2 x 2 x 2 sub-points, so that no holes show between neighbours. Nothing here depends on the
    object: rendering is a look-up in these two (C, V, S) tables.
    """
    cells = np.stack(np.meshgrid(*[np.arange(GRID)] * 3, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    corners = np.stack(np.meshgrid(*[[-0.25, 0.25]] * 3, indexing="ij"), axis=-1).reshape(1, -1, 3)
    points_CS3 = cells - (GRID - 1) / 2 + corners
    angle_V = 2 * np.pi * np.arange(NUM_VIEWS) / NUM_VIEWS
    sin, cos = np.sin(angle_V), np.cos(angle_V)
    rise, reach, level = np.sin(_ELEVATION), np.cos(_ELEVATION), np.zeros(NUM_VIEWS)
    right_V3 = np.stack([-sin, cos, level], axis=-1)
    up_V3 = np.stack([-cos * rise, -sin * rise, level + reach], axis=-1)
    towards_camera_V3 = np.stack([cos * reach, sin * reach, level + rise], axis=-1)
    across_CVS = np.einsum("csi,vi->cvs", points_CS3, right_V3)
    height_CVS = np.einsum("csi,vi->cvs", points_CS3, up_V3)
    depth_CVS = np.einsum("csi,vi->cvs", points_CS3, towards_camera_V3)
    column = np.floor((across_CVS / _HALF_WIDTH + 1) * (PICTURE / 2)).astype(np.int32)
    row = np.floor((1 - height_CVS / _HALF_WIDTH) * (PICTURE / 2)).astype(np.int32)
    inside = (column >= 0) & (column < PICTURE) & (row >= 0) & (row < PICTURE)
    view = np.arange(NUM_VIEWS, dtype=np.int32)[None, :, None]
    # Sub-points outside the picture share one extra pixel at the end, which is cut off after drawing.
    pixel = np.where(inside, (view * PICTURE + row) * PICTURE + column, NUM_VIEWS * PICTURE * PICTURE)
    brightness = (155 + np.clip(depth_CVS / _DEPTH, -1, 1) * 100).astype(np.uint8)
    return pixel.astype(np.int32).reshape(GRID**3, -1), brightness.reshape(GRID**3, -1)


def render_views(grids: Grids, *, advance: Callable[[int], None] = lambda _amount: None) -> Views:
    """Render (N, 30, 30, 30) grids of 0 and 1 as (N, 12, 32, 32) depth pictures. An empty grid gives black pictures."""
    if grids.ndim != 4 or grids.shape[1:] != (GRID,) * 3:
        raise DataError(f"grids of shape={grids.shape} cannot be rendered; give (N, {GRID}, {GRID}, {GRID})")
    pixel, brightness = _projection()
    num_pixels = NUM_VIEWS * PICTURE * PICTURE
    views = np.zeros((len(grids), num_pixels), dtype=np.uint8)
    canvas = np.empty(num_pixels + 1, dtype=np.uint8)
    for index, grid in enumerate(grids):
        occupied = np.flatnonzero(grid)
        canvas.fill(0)
        np.maximum.at(canvas, pixel[occupied].reshape(-1), brightness[occupied].reshape(-1))
        views[index] = canvas[:-1]
        advance(1)
    return views.reshape(len(grids), NUM_VIEWS, PICTURE, PICTURE)


def load_views(bits: dict[str, Grids], *, folder: Path, progress: bool) -> dict[str, Views]:
    """Return the pictures of packed grids {"train": (N, 3375), "test": ...}, rendered unless `folder` has them."""
    digest = hashlib.sha256(f"{_RENDERING} {NUM_VIEWS} {GRID} {PICTURE}".encode())
    for split in ("train", "test"):
        digest.update(bits[split].tobytes())
    target = folder / f"views-{digest.hexdigest()[:16]}.npz"
    if not target.is_file():
        total = sum(len(bits[split]) for split in bits)
        with sources.progress_bar("Rendering ModelNet10", total, enabled=progress) as advance:
            rendered = {split: render_views(unpack_grids(bits[split]), advance=advance) for split in ("train", "test")}
        sources.save_arrays(target, train=rendered["train"], test=rendered["test"])
        return rendered
    train, test = sources.read_arrays(target, "train", "test")
    return {"train": train, "test": test}


def unpack_grids(bits: Grids) -> Grids:
    return np.unpackbits(bits, axis=1, count=GRID**3).reshape(-1, GRID, GRID, GRID)


def pack_grids(grids: Grids) -> Grids:
    return np.packbits(grids.reshape(len(grids), -1), axis=1)


def read_off(text: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Read vertices (n, 3) and triangles (m, 3) of a mesh in the OFF format; polygons become fans of triangles.

    Some ModelNet files have the counts in the first line, right after the letters OFF, without a space.
    """
    words = re.sub(r"#[^\n]*", "", text).split()
    if not words or not words[0].startswith("OFF"):
        raise DataError("a mesh file does not begin with OFF; it is not in the format that ModelNet uses")
    words = [words[0][3:], *words[1:]] if len(words[0]) > 3 else words[1:]
    try:
        num_vertices, num_faces = int(words[0]), int(words[1])
        end = 3 + 3 * num_vertices
        vertices = np.array(words[3:end], dtype=np.float64).reshape(num_vertices, 3)
        numbers = np.array(words[end:], dtype=np.int64)
        if len(numbers) == 4 * num_faces and (numbers[::4] == 3).all():  # triangles only: nearly every file
            triangles = numbers.reshape(-1, 4)[:, 1:]
        else:
            fans, position = [], 0
            for _ in range(num_faces):
                corners = numbers[position + 1 : position + 1 + int(numbers[position])]
                fans += [(corners[0], corners[i], corners[i + 1]) for i in range(1, len(corners) - 1)]
                position += 1 + len(corners)
            triangles = np.array(fans, dtype=np.int64).reshape(-1, 3)
    except (ValueError, IndexError) as error:
        raise DataError(f"a mesh file is damaged ({error}); fetch the archive again") from error
    if not np.isfinite(vertices).all() or (
        triangles.size and not 0 <= triangles.min() <= triangles.max() < num_vertices
    ):
        raise DataError("a mesh file names vertices that it does not have, or has some at infinity; fetch it again")
    return vertices, triangles


def voxelise(vertices: npt.NDArray[np.float64], triangles: npt.NDArray[np.int64]) -> Grids:
    """Return the cells that a surface touches: (30, 30, 30) of 0 and 1, axis 2 up, the longest side 24 cells, centred.

    Each triangle is sampled on a lattice of at most half a cell. Size and place in the grid follow the grids that
    others have published; cells are not identical to theirs, where walls can be thicker or filled.
    """
    grid = np.zeros((GRID,) * 3, dtype=np.uint8)
    if not len(triangles):
        return grid
    used = vertices[np.unique(triangles)]
    low, high = used.min(axis=0), used.max(axis=0)
    longest = float((high - low).max())
    if longest == 0:
        return grid
    # The last cell's far wall belongs to the cell: just below 24 keeps a flat top from opening a 25th layer.
    scale = (_OBJECT - 1e-6) / longest
    corners_T33 = ((vertices - (low + high) / 2) * scale + GRID / 2)[triangles]
    edges = corners_T33 - np.roll(corners_T33, 1, axis=1)
    steps_T = np.ceil(2 * np.linalg.norm(edges, axis=2).max(axis=1)).astype(np.int64).clip(1)
    for steps in np.unique(steps_T):
        i, j = np.meshgrid(np.arange(steps + 1), np.arange(steps + 1), indexing="ij")
        keep = i + j <= steps
        weights = np.stack([i[keep], j[keep], (steps - i - j)[keep]], axis=-1) / steps
        points = np.einsum("wk,tkd->twd", weights, corners_T33[steps_T == steps]).reshape(-1, 3)
        x, y, z = np.floor(points).astype(np.int64).T
        grid[x, y, z] = 1
    return grid


def grids_from_meshes(path: Path, *, progress: bool) -> dict[str, npt.NDArray[Any]]:
    """Return all meshes of ModelNet10.zip as packed grids with their labels, without unpacking the archive to disk."""
    pattern = re.compile(r"(?:^|/)ModelNet10/(\w+)/(train|test)/\1_\d+\.off$")
    result: dict[str, npt.NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            matches = [m for m in map(pattern.search, sorted(archive.namelist())) if m and "__MACOSX" not in m.string]
            members = [(m[2], m[1], m.string) for m in matches if m[1] in MODELNET10_CLASSES]
            for split, counts in MODELNET10_COUNTS.items():
                found = tuple(sum((s, c) == (split, name) for s, c, _ in members) for name in MODELNET10_CLASSES)
                if found != counts:
                    raise DataError(f"{path}: {split} meshes per class are {found}; ModelNet10 has {counts}")
            with sources.progress_bar("Reading ModelNet10 meshes", len(members), enabled=progress) as advance:
                for split in MODELNET10_COUNTS:
                    bits, labels = [], []
                    for _, name, member in (entry for entry in members if entry[0] == split):
                        grid = voxelise(*read_off(archive.read(member).decode("ascii", errors="replace")))
                        bits.append(pack_grids(grid[None])[0])
                        labels.append(MODELNET10_CLASSES.index(name))
                        advance(1)
                    result[f"bits_{split}"] = np.stack(bits)
                    result[f"y_{split}"] = np.array(labels, dtype=np.uint8)
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and load again") from error
    return result
