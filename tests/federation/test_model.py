"""A trained federation as files: parts that stay apart, come back to the bit, and are refused if anything is wrong."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import pbmvfl
from pbmvfl import FederatedModel, Federation, Plan, ReleaseOptions
from pbmvfl.data.new_rows import NewRows
from pbmvfl.data.vertical import VerticalDataset
from pbmvfl.errors import CheckpointError, DataError, ModelError, PlanError, WrongPlan
from pbmvfl.federation.model_files import folder_name
from pbmvfl.federation.party_setup import PartySetup
from pbmvfl.federation.serving import release_for, serving_plan
from pbmvfl.ledger.ledger_folder import OpenLedgers
from pbmvfl.protocol.server import Server
from support.federation_runs import forget_answers, own_networks
from support.local_plans import local_plan, voting_plan


def table(rows: int = 120, *, classes: int = 3, name: str = "small") -> VerticalDataset:
    known = np.random.default_rng(5)
    labels = known.integers(0, classes, size=rows)
    parts = [(known.normal(size=(rows, 4)) + labels[:, None] * 0.8).astype(np.float32) / 4 for _ in range(3)]
    cut = rows * 3 // 4
    return VerticalDataset(
        name=name,
        party_names=("bank", "shop", "clinic"),
        train_features=tuple(part[:cut] for part in parts),
        test_features=tuple(part[cut:] for part in parts),
        train_labels=labels[:cut],
        test_labels=labels[cut:],
        class_names=tuple("xyz"[:classes]),
        default_encoder="linear",
    )


@pytest.fixture(scope="module")
def data() -> VerticalDataset:
    return table()


@pytest.fixture(scope="module")
def model(data) -> FederatedModel:
    found = Federation(voting_plan(data, evaluation="simulator")).fit(data).model
    assert found is not None
    return found


def scores_from_files(folder: Path, data: VerticalDataset, plan: Plan) -> np.ndarray:
    """Exact class scores from the files alone, in numpy: centre, clip, whiten, a linear layer, a sum, shares."""
    server = load_file(folder / "server" / "weights.safetensors")
    total = next(value for key, value in server.items() if key.endswith("prior_K"))[None, :]
    for name, rows in zip(data.party_names, data.test_features, strict=True):
        part = load_file(folder / name / "weights.safetensors")
        centred = rows.astype(np.float64) - part["preparation.mean"]
        radius = plan.gram_clip * np.sqrt(rows.shape[1])
        centred *= np.minimum(1, radius / np.linalg.norm(centred, axis=1, keepdims=True))
        weights = next(value for key, value in part.items() if key.endswith("weight"))
        bias = next(value for key, value in part.items() if key.endswith("bias"))
        total = total + centred @ part["preparation.matrix"] @ weights.T + bias
    shares = np.exp(total - total.max(axis=1, keepdims=True))
    return np.log(shares / shares.sum(axis=1, keepdims=True))


# --- files ---


def test_a_saved_model_computes_what_its_files_say(model, data, tmp_path):
    loaded = pbmvfl.load(copy_of(model, tmp_path))
    exact = loaded.release(data, ReleaseOptions(exact=True))
    np.testing.assert_allclose(exact.scores_NK, scores_from_files(tmp_path / "m", data, model.plan), atol=2e-4)
    assert np.array_equal(exact.scores_NK, model.release(data, ReleaseOptions(exact=True)).scores_NK)
    assert (loaded.party_names, loaded.class_names, loaded.dataset) == (data.party_names, data.class_names, "small")


def copy_of(model: FederatedModel, tmp_path: Path) -> Path:
    return model.save(tmp_path / "m")


def test_a_part_has_nothing_of_another_party(model, data, tmp_path):
    folder = copy_of(model, tmp_path)
    for index, name in enumerate(data.party_names):
        said = (folder / name / "part.json").read_text()
        others = [other for other in data.party_names if other != name]
        assert not any(other in said for other in others)
        tensors = load_file(folder / name / "weights.safetensors")
        assert set(tensors) == {
            "model.network.0.weight",
            "model.network.0.bias",
            "preparation.mean",
            "preparation.matrix",
            "run.public_start",
        }
        assert (folder / name).stat().st_mode & 0o077 == 0
        assert all(path.stat().st_mode & 0o077 == 0 for path in (folder / name).iterdir())
        del index
    assert "bank" in (folder / "server" / "part.json").read_text()


def test_no_file_of_a_model_has_a_row_in_it(model, data, tmp_path):
    """The bytes of every row's four numbers, at each party, occur in no file."""
    folder = copy_of(model, tmp_path)
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 8
    for part in (*data.train_features, *data.test_features):
        for row in part:
            assert not any(row.tobytes() in content for content in files)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path_factory, drawn):
    folder = flipped_model(tmp_path_factory)
    path = drawn.draw(st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())))
    before = path.read_bytes()
    place, bit = drawn.draw(st.integers(0, len(before) - 1)), drawn.draw(st.integers(0, 7))
    try:
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
        try:
            pbmvfl.load(folder)
        except ModelError:
            return
        # Only blanks between the words of JSON may be another sort of blank.
        assert path.suffix == ".json"
        assert json.loads(path.read_bytes()) == json.loads(before)
    finally:
        path.write_bytes(before)


def flipped_model(tmp_path_factory, kept: list[Path] = []) -> Path:  # noqa: B006  (made once)
    if not kept:
        data = table()
        trained = Federation(voting_plan(data, evaluation="simulator")).fit(data).model
        assert trained is not None
        kept.append(trained.save(tmp_path_factory.mktemp("flipped") / "m"))
    return kept[0]


def test_a_missing_part_is_named(model, tmp_path):
    folder = copy_of(model, tmp_path)
    shutil.rmtree(folder / "shop")
    with pytest.raises(ModelError, match="lacks the part of shop"):
        pbmvfl.load(folder)
    shutil.rmtree(folder / "server")
    with pytest.raises(ModelError, match="server has no part of a model"):
        pbmvfl.load(folder)
    with pytest.raises(ModelError, match="does not exist"):
        pbmvfl.load(tmp_path / "nowhere")


def test_parts_of_two_trainings_do_not_make_a_model(model, data, tmp_path):
    """The same plan and the same data: only the run is another."""
    folder = copy_of(model, tmp_path)
    other = Federation(model.plan).fit(data).model
    assert other is not None
    other.save(tmp_path / "other")
    shutil.rmtree(folder / "clinic")
    shutil.copytree(tmp_path / "other" / "clinic", folder / "clinic")
    with pytest.raises(ModelError, match="'clinic' is of another model"):
        pbmvfl.load(folder)


def test_a_part_in_another_partys_folder_is_refused(model, tmp_path):
    folder = copy_of(model, tmp_path)
    shutil.rmtree(folder / "shop")
    shutil.copytree(folder / "bank", folder / "shop")
    with pytest.raises(ModelError, match="parts of bank, bank, clinic"):
        pbmvfl.load(folder)


def test_another_version_is_refused_by_its_number(model, tmp_path):
    folder = copy_of(model, tmp_path)
    path = folder / "bank" / "part.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(ModelError, match=r"format=9; this version reads format 1"):
        pbmvfl.load(folder)


def test_a_folder_with_something_in_it_is_not_written_to(model, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("x")
    with pytest.raises(ModelError, match="exists already"):
        model.save(tmp_path / "m")
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["thesis.txt"]


def test_names_of_parties_make_folders_that_stay_apart():
    names = ["bank", "a b", "a_b", "a_b-1", "server", "Server", "../up", "é", "", "a/b", "a\\b", "x" * 300, "x" * 301]
    folders = [folder_name(name) for name in names]
    assert len({folder.lower() for folder in folders} | {"server"}) == len(names) + 1
    assert all("/" not in folder and not folder.startswith(".") and 0 < len(folder) < 80 for folder in folders)


@pytest.mark.parametrize("dump", [pickle.dumps, copy.deepcopy])
def test_a_federation_and_a_model_are_not_pickled(dump, model):
    for thing in (Federation(model.plan), model):
        with pytest.raises(ModelError, match=r"cannot be pickled.*pbmvfl.load\(folder\)"):
            dump(thing)


def test_a_federation_saves_the_model_of_its_last_fit(data, tmp_path):
    federation = Federation(local_plan(data, noise_multiplier=1.0))
    with pytest.raises(ModelError, match="call fit"):
        federation.save(tmp_path / "m")
    result = federation.fit(data)
    federation.save(tmp_path / "m")
    assert result.model is federation.model
    assert pbmvfl.load(tmp_path / "m").digest == result.model.digest


# --- how it was trained ---


def test_parties_in_processes_leave_a_model_of_what_each_of_them_kept(data, tmp_path):
    """Weights never pass a transport; with the same plan and no noise they are the same as in one process."""
    plan = local_plan(data)
    here = Federation(plan).fit(data).model
    there = Federation(plan, parties="processes").fit(data, checkpoints=tmp_path / "c").model
    assert here is not None
    assert there is not None
    scores = [each.release(data, ReleaseOptions(exact=True)).scores_NK for each in (here, there)]
    assert np.array_equal(*scores)
    assert Federation(plan, parties="processes").fit(data).model is None


def test_own_networks_are_given_again_and_get_their_weights_back(data, tmp_path):
    plan = Plan.for_data(data, embedding_dim=3, num_epochs=2, batch_size=30, num_trials=16, beta=0.2)
    trained = Federation(plan, encoders=own_networks(plan, data)).fit(data).model
    assert trained is not None
    trained.save(tmp_path / "m")
    with pytest.raises(ModelError, match="own networks; give them again"):
        pbmvfl.load(tmp_path / "m")
    loaded = pbmvfl.load(tmp_path / "m", encoders=own_networks(plan, data))
    assert np.array_equal(
        loaded.release(data, ReleaseOptions(exact=True)).scores_NK,
        trained.release(data, ReleaseOptions(exact=True)).scores_NK,
    )


def test_a_model_stays_as_it_was_when_its_federation_trains_again(data):
    federation = Federation(local_plan(data, noise_multiplier=1.0, seed=3))
    first = federation.fit(data).model
    assert first is not None
    before = first.release(data, ReleaseOptions(exact=True)).scores_NK.copy()
    federation.fit(data)
    forget_answers(first)
    assert np.array_equal(first.release(data, ReleaseOptions(exact=True)).scores_NK, before)


def test_a_model_that_a_limit_ended_early_can_still_be_asked(data, tmp_path):
    from pbmvfl.ledger.ledger import Ledger
    from pbmvfl.ledger.ledger_folder import ledger_file_of
    from pbmvfl.ledger.limits import Limit

    plan = local_plan(
        data,
        noise_multiplier=20.0,
        evaluation="released",
        num_epochs=30,
        prediction_mechanism="krr",
        vote="top",
        num_fusion_samples=4,
        prediction_symbols=3,
        prediction_response_epsilon=1.0,
    )
    limit = Limit.choose(unit="cell", accounting="strict", epsilon=2.0, delta=1e-5)
    for index, name in enumerate(data.party_names):
        Ledger(ledger_file_of(tmp_path, index, name)).set_limit("small", limit)
    result = Federation(plan).fit(data, ledger=tmp_path, until_limit=True)
    assert result.stopped
    assert result.model is not None
    assert result.model.release(data, ReleaseOptions(exact=True, exact_metrics=True)).is_known.all()


# --- rows ---


def test_rows_that_do_not_fit_are_refused_before_anything_is_released(model, data):
    seen: list[object] = []
    model.taps.append(lambda *message: seen.append(message))
    parts = data.test_features
    with pytest.raises(ModelError, match="columns of 2 parties; this model has 3: bank, shop, clinic"):
        model.predict(list(parts[:2]))
    with pytest.raises(
        ModelError, match=r"party='shop': rows are float32\(3,\), the model was trained on float32\(4,\)"
    ):
        model.predict([parts[0], parts[1][:, :3], parts[2]])
    with pytest.raises(DataError, match="every party, the ids and the labels must have the same rows"):
        model.predict([parts[0], parts[1], parts[2][:29]])
    with pytest.raises(ModelError, match="trained on arrays without column names"):
        model.predict("new.csv")
    with pytest.raises(PlanError, match="prediction_epsilon=-1"):
        model.predict(data, ReleaseOptions(epsilon=-1))
    with pytest.raises(DataError, match="no labels to compare with"):
        model.evaluate(list(parts), ReleaseOptions(exact=True))
    with pytest.raises(DataError, match=r"row=2 .* has a class that the model does not know; it knows x, y, z"):
        model.score([part[:3] for part in parts], ["x", "y", "w"], ReleaseOptions(exact=True))
    model.taps.clear()
    assert not seen


def test_labels_of_rows_are_compared_by_their_names(model, data):
    exact = model.release(data, ReleaseOptions(exact=True))
    right = sum(a == data.class_names[b] for a, b in zip(exact.labels, data.test_labels, strict=True))
    names = [data.class_names[label] for label in data.test_labels]
    assert model.score(list(data.test_features), names, ReleaseOptions(exact=True)) == pytest.approx(right / 30)
    assert model.evaluate(data, ReleaseOptions(exact=True)) == {"test_accuracy": pytest.approx(right / 30)}


def test_predictions_are_written_for_people_and_machines(model, data, tmp_path):
    import pyarrow.parquet as pq

    found = model.release(data, ReleaseOptions(exact=True))
    found.write(tmp_path / "p.parquet")
    read = pq.read_table(tmp_path / "p.parquet").to_pydict()
    assert list(read) == ["id", "prediction", "p(x)", "p(y)", "p(z)", "label"]
    assert read["id"] == [str(90 + row) for row in range(30)]
    assert read["prediction"] == found.labels.tolist()
    np.testing.assert_allclose(np.array([read[f"p({name})"] for name in "xyz"]).sum(axis=0), 1)
    found.write(tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text().splitlines()[0] == '"id","prediction","p(x)","p(y)","p(z)","label"'
    with pytest.raises(DataError, match=r"ends in '\.txt'; permitted are \.parquet and \.csv"):
        found.write(tmp_path / "p.txt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.csv", "p.parquet"]


# --- plans that only ask ---


def test_a_plan_that_asks_a_model_trains_nothing_and_needs_its_parts(model, data):
    release = release_for(model.plan, epsilon=None, delta=1e-5, has_fusion=True)
    plan = serving_plan(model.plan, model=model.digest, num_rows=30, release=release)
    assert [kind.name for kind in plan.schedule.kinds] == ["prediction"]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.hash != serving_plan(model.plan, model="0" * 64, num_rows=30, release=release).hash
    with pytest.raises(PlanError, match="either trains or goes on with a trained model"):
        plan.replace(phases=model.plan.rounds.phases)
    with pytest.raises(PlanError, match="model='abc' must be a SHA-256 digest"):
        plan.replace(model="abc")
    with pytest.raises(WrongPlan, match="labels of training rows, or its part"):
        Server(plan, train_labels=data.train_labels)
    setup = model._setups(
        plan,
        NewRows(
            name="small", party_names=data.party_names, features=data.test_features, ids=tuple(map(str, range(30)))
        ),
        None,
        OpenLedgers(),
        "",
    )[0]
    assert isinstance(setup, PartySetup)
    from dataclasses import replace

    with pytest.raises(WrongPlan, match="no part of a model, and the plan needs one"):
        replace(setup, trained=None).build()
    wrong = {**setup.trained, "model.network.0.weight": torch.zeros(3, 5)}
    with pytest.raises(CheckpointError, match="does not fit the network"):
        replace(setup, trained=wrong).build()


def test_without_a_fusion_model_votes_are_read_as_the_scores_that_they_stand_for(data):
    """At any epsilon; a fusion model reads the law of its fusion rows, at its cost, and refuses less."""
    trained = Federation(local_plan(data, noise_multiplier=3.0)).fit(data).model
    assert trained is not None
    mechanisms = set()
    for epsilon in (6.0, 2.5, 0.5):
        found = trained.release(data, ReleaseOptions(epsilon=epsilon))
        mechanisms.add(found.plan.prediction.name)
        assert found.privacy(delta=1e-5).bound("cell", "strict").epsilon <= epsilon
        assert np.isfinite(found.scores_NK).all()
        np.testing.assert_allclose(found.probabilities.sum(axis=1), 1, atol=1e-6)
    assert mechanisms == {"krr"}, "two parties add little noise each"
    assert any("hardly better than the most frequent class" in note for note in trained.prediction_notes(epsilon=0.1))
    plan = voting_plan(data, evaluation="none")
    fused = Federation(plan).fit(data).model
    assert fused is not None
    more = fused.release(data, ReleaseOptions(epsilon=6.0))
    assert more.plan.prediction == plan.prediction
    assert more.privacy(delta=1e-5).bound("cell", "strict").epsilon <= 2.0
    assert not fused.prediction_notes(epsilon=6.0)
    with pytest.raises(PlanError, match=r"reads releases of epsilon 2\.00 alone"):
        fused.release(data, ReleaseOptions(epsilon=1.0))


def test_a_model_without_privacy_is_asked_exactly_or_not_at_all(data):
    plan = Plan.for_data(data, mechanism="none", embedding_dim=3, num_epochs=1, batch_size=30)
    trained = Federation(plan).fit(data).model
    assert trained is not None
    with pytest.raises(ModelError, match="trained without privacy"):
        trained.predict(data)
    assert trained.release(data, ReleaseOptions(exact=True)).exact


def test_a_model_with_a_trained_head_releases_as_it_was_trained(data):
    plan = Plan.for_data(data, embedding_dim=3, num_epochs=1, batch_size=30, num_trials=64, beta=0.25)
    trained = Federation(plan).fit(data).model
    assert trained is not None
    assert trained.release(data).plan.mechanism_for(trained.release(data).plan.schedule.kinds[0]) == plan.release
    with pytest.raises(PlanError, match="epsilon=2 cannot be chosen for this model"):
        trained.predict(data, ReleaseOptions(epsilon=2))
    # Its weights know rows without noise: what each prediction says of those is charged to all of them.
    with pytest.raises(ModelError, match="leave dataset out"):
        trained.predict(data, dataset="others")
    assert not trained.release(data).public_start


# --- the format is a promise ---


def test_a_model_with_counts_of_votes_is_refused_with_words_to_train_again():
    with pytest.raises(ModelError, match=r"counts votes, as plans of earlier versions did; .* train again"):
        pbmvfl.load(Path(__file__).parents[1] / "data" / "model-with-counts" / "model")


def test_a_model_of_format_1_is_read_and_computes_what_it_did(tmp_path):
    """Written once by the version that made the format; `scores.json` has what that version computed of two rows."""
    folder = tmp_path / "kept"
    shutil.copytree(Path(__file__).parents[1] / "data" / "model-format-1", folder)
    model = pbmvfl.load(folder / "model")
    assert model.party_names == ("bank", "shop")
    assert model.class_names == ("goes", "stays")
    assert [part.names for part in model.columns or ()] == [("income", "job"), ("visits",)]
    known = json.loads((folder / "scores.json").read_text())
    exact = model.release(folder / "rows.csv", ReleaseOptions(exact=True))
    np.testing.assert_allclose(exact.scores_NK, known, atol=1e-5)
    assert model.release(folder / "rows.csv", ReleaseOptions(uncharged=True)).is_known.all()
