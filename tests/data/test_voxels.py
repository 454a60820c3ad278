"""Meshes to grids and grids to depth pictures, against slow twins that share no code with the fast ones."""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pbmvfl.data import load_dataset, sources, voxels
from pbmvfl.errors import DataError

BOX = (
    "OFF\n8 6 0\n"
    + "\n".join(f"{x} {y} {z}" for x in (0, 2) for y in (0, 1) for z in (0, 1))
    + """
4 0 1 3 2
4 4 6 7 5
4 0 4 5 1
4 2 3 7 6
4 0 2 6 4
4 1 5 7 3
"""
)


def slow_view(grid: np.ndarray, view: int) -> np.ndarray:
    """One picture, point by point, from the definition."""
    picture = np.zeros((32, 32), np.uint8)
    a, e = 2 * math.pi * view / 12, math.radians(30)
    for x, y, z in np.argwhere(grid):
        for corner in range(8):
            p = [c - 14.5 + (0.25 if corner >> axis & 1 else -0.25) for axis, c in enumerate((x, y, z))]
            across = -math.sin(a) * p[0] + math.cos(a) * p[1]
            outwards = math.cos(a) * p[0] + math.sin(a) * p[1]
            height = math.cos(e) * p[2] - math.sin(e) * outwards
            near = math.cos(e) * outwards + math.sin(e) * p[2]
            column, row = math.floor((across / 18.75 + 1) * 16), math.floor((1 - height / 18.75) * 16)
            if 0 <= column < 32 and 0 <= row < 32:
                picture[row, column] = max(picture[row, column], int(155 + near / 26 * 100))
    return picture


def random_grid(seed: int, density: float = 0.01) -> np.ndarray:
    return (np.random.default_rng(seed).random((30, 30, 30)) < density).astype(np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_pictures_equal_those_drawn_point_by_point(seed: int) -> None:
    grid = random_grid(seed)
    views = voxels.render_views(grid[None])[0]
    for view in range(12):
        np.testing.assert_array_equal(views[view], slow_view(grid, view))


def test_a_quarter_turn_of_the_object_is_three_views_further() -> None:
    grid = random_grid(7)
    turned = np.rot90(grid, axes=(0, 1))  # from axis 0 towards axis 1, as the cameras go round
    before, after = voxels.render_views(np.stack([grid, turned]))
    np.testing.assert_array_equal(np.roll(before, 3, axis=0), after)
    assert not np.array_equal(before, after)


def test_an_empty_grid_is_dark_and_a_full_one_has_no_holes() -> None:
    grids = np.zeros((2, 30, 30, 30), np.uint8)
    grids[1, 3:27, 3:27, 3:27] = 1
    empty, full = voxels.render_views(grids)
    assert empty.max() == 0
    for picture in full:
        assert picture[16, 16] > 155
        for line in picture:
            lit = np.flatnonzero(line)
            assert len(lit) == 0 or (np.diff(lit) == 1).all()


def test_grids_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match="cannot be rendered"):
        voxels.render_views(np.zeros((2, 16, 16, 16), np.uint8))


@given(grids=npst.arrays(np.uint8, (2, 30, 30, 30), elements=st.integers(0, 1), fill=st.integers(0, 1)))
@settings(max_examples=10, deadline=None)
def test_packing_grids_loses_nothing(grids: np.ndarray) -> None:
    packed = voxels.pack_grids(grids)
    assert packed.shape == (2, 3375)
    np.testing.assert_array_equal(voxels.unpack_grids(packed), grids)


def test_a_mesh_is_read_and_its_polygons_cut_into_triangles() -> None:
    vertices, triangles = voxels.read_off(BOX)
    assert (vertices.shape, triangles.shape) == ((8, 3), (12, 3))
    edges = vertices[triangles]
    area = np.linalg.norm(np.cross(edges[:, 1] - edges[:, 0], edges[:, 2] - edges[:, 0]), axis=1).sum() / 2
    assert area == pytest.approx(10)  # of a box of 2 x 1 x 1


def test_counts_glued_to_the_first_word_and_comments_are_understood() -> None:
    plain = voxels.read_off("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n")
    glued = voxels.read_off("OFF3 1 0 # three corners\n0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n")
    for one, other in zip(plain, glued, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "text",
    ["", "PLY 3 1 0", "OFF", "OFF 3 1 0 0 0", "OFF 3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 9", "OFF 1 1 0\n0 0 inf\n3 0 0 0"],
)
def test_a_damaged_mesh_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        voxels.read_off(text)


def test_a_cube_becomes_a_closed_shell_of_24_cells() -> None:
    vertices, triangles = voxels.read_off(BOX)
    grid = voxels.voxelise(vertices * [0.5, 1, 1], triangles)
    shell = np.zeros_like(grid)
    shell[3:27, 3:27, 3:27] = 1
    shell[4:26, 4:26, 4:26] = 0
    np.testing.assert_array_equal(grid, shell)


def test_axis_two_stays_up() -> None:
    vertices, triangles = voxels.read_off(BOX)
    occupied = np.argwhere(voxels.voxelise(vertices * [0.5, 1, 2], triangles))
    assert np.ptp(occupied, axis=0).tolist() in ([12, 12, 23], [11, 11, 23])


@given(
    corners=npst.arrays(np.float64, (9, 3), elements=st.floats(-5, 5), unique=True),
    scale=st.floats(1e-3, 1e3),
)
@settings(max_examples=40, deadline=None)
def test_any_surface_fits_its_box_and_every_point_of_it_has_a_cell_nearby(corners: np.ndarray, scale: float) -> None:
    triangles = np.arange(9).reshape(3, 3)
    grid = voxels.voxelise(corners * scale, triangles)
    occupied = np.argwhere(grid)
    assert occupied.min() >= 3
    assert occupied.max() <= 26
    assert np.ptp(occupied, axis=0).max() == 23
    low, high = corners.min(axis=0), corners.max(axis=0)
    weights = np.random.default_rng(0).dirichlet([1, 1, 1], size=50)
    points = np.einsum("wk,tkd->twd", weights, corners[triangles]).reshape(-1, 3)
    cells = (points - (low + high) / 2) * 24 / (high - low).max() + 15
    distance = np.abs(cells[:, None] - (occupied + 0.5)).max(axis=2).min(axis=1)
    assert distance.max() <= 1.0


def test_a_mesh_without_extent_gives_an_empty_grid() -> None:
    assert voxels.voxelise(np.zeros((3, 3)), np.array([[0, 1, 2]])).sum() == 0
    assert voxels.voxelise(np.ones((3, 3)), np.empty((0, 3), np.int64)).sum() == 0


def mesh_archive(counts: dict[str, tuple[int, ...]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for split, numbers in counts.items():
            for name, count in zip(voxels.MODELNET10_CLASSES, numbers, strict=True):
                for number in range(count):
                    archive.writestr(f"ModelNet10/{name}/{split}/{name}_{number:04d}.off", BOX)
        archive.writestr("__MACOSX/ModelNet10/bed/train/._bed_0001.off", "junk")
        archive.writestr("ModelNet10/README.txt", "read me")
    return buffer.getvalue()


@pytest.fixture
def small_modelnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """An archive of ModelNet10's form with a few boxes, which the loader is made to expect and can 'fetch'."""
    counts = {"train": (2, 1, 1, 1, 1, 1, 1, 1, 1, 1), "test": (1,) * 10}
    packed = mesh_archive(counts)
    monkeypatch.setenv("PBMVFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pbmvfl.data.datasets.data_root", lambda: None)
    monkeypatch.setattr(voxels, "MODELNET10_COUNTS", counts)
    monkeypatch.setattr(sources, "MODELNET10", replace(sources.MODELNET10, size=len(packed)))
    monkeypatch.setattr(sources, "open_url", lambda _url: io.BytesIO(packed))
    return packed


def test_meshes_are_fetched_gridded_and_rendered(small_modelnet: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_modelnet
    data = load_dataset("modelnet10", num_parties=3, progress=False)
    assert data.train_labels.tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert {part.shape for part in data.train_features} == {(11, 4, 32, 32)}
    expected = voxels.render_views(voxels.voxelise(*voxels.read_off(BOX))[None])[0]
    np.testing.assert_array_equal(np.concatenate(data.test_features, axis=1)[4], expected)
    assert "made from the meshes here" in data.notes[0]
    monkeypatch.setattr(voxels, "voxelise", lambda *_args: pytest.fail("gridded again"))
    assert load_dataset("modelnet10", num_parties=3, progress=False).notes == data.notes


def test_an_archive_put_there_by_hand_is_used(
    small_modelnet: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "open_url", lambda _url: pytest.fail("the network was used"))
    (tmp_path / "copies" / "modelnet10").mkdir(parents=True)
    (tmp_path / "copies" / "modelnet10" / "ModelNet10.zip").write_bytes(small_modelnet)
    assert load_dataset("modelnet10", root=tmp_path / "copies", progress=False).num_samples == 11


def test_an_archive_with_a_mesh_missing_is_refused(small_modelnet: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert small_modelnet
    monkeypatch.setattr(voxels, "MODELNET10_COUNTS", {"train": (2,) * 10, "test": (1,) * 10})
    with pytest.raises(DataError, match="train meshes per class are"):
        load_dataset("modelnet10", progress=False)
