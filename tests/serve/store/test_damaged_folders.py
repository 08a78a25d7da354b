"""A data folder that was damaged: everything is what it was, or an error that names the file.

Long because each file of a folder with files, uploads, jobs and Tinker's models is damaged in turn.
"""

import hashlib
import re
import shutil
from collections import Counter
from pathlib import Path

import openai
import pytest
import tinker

from pcg.errors import PcgError, ServeError
from pcg.files import sha256_of
from pcg.peft.adapter_files import digest_of, read_adapter
from pcg.runtime.training.checkpoints import CheckpointStore, last_good
from pcg.serve.files.files import Files
from pcg.serve.jobs.folders import JobFolder
from pcg.serve.jobs.runner import JobRunner
from pcg.serve.store.check import check_folder
from pcg.serve.store.contents import named_paths
from pcg.serve.store.store import open_store
from pcg.serve.store.tables import held_data
from tests.support import tinker_client
from tests.support.damage import damage, damages
from tests.support.job_client import begin, client_of, ended, events, steps, text, upload
from tests.support.waiting import until

OWN = re.compile(
    r"lock|reserve|(.*/)?SHA256SUMS|identity.json|pcg.sqlite.*|.*/record/.*|tinker_runs/.*"
)
"""Files that hold nothing of a tenant's but rows, and records, which have no checksums."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder that a server filled: files, a job that is over, a paused one, a Tinker model."""
    folder = tmp_path_factory.mktemp("made") / "data"
    with (
        tinker_client.server(folder) as server,
        client_of(server.url, tinker_client.KEY) as client,
        tinker_client.client(server.url) as service,
    ):
        for number in range(3):
            content = f"content {number}\n".encode() * 40
            client.files.create(file=(f"{number}.txt", content), purpose="fine-tune")
        pending = client.uploads.create(
            bytes=8, filename="part", mime_type="text/plain", purpose="user_data"
        )
        client.uploads.parts.create(pending.id, data=b"part")
        over = begin(client, epochs=2)
        paused = begin(client, epochs=400, own={"save_every": 2}, training_file=upload(client))
        assert ended(client, over.id).status == "succeeded"
        checkpoints = folder / "jobs" / paused.id / "checkpoints"
        until(lambda: len(list(checkpoints.glob("step-*"))) >= 2)
        client.fine_tuning.jobs.pause(paused.id)
        trained = service.create_lora_training_client(
            base_model=tinker_client.MODEL, rank=2, seed=0
        ).result(60)
        trained.save_state("whole").result(60)
        trained.save_weights_for_sampler("sampler").result(60)
        until(lambda: not server.service.part(JobRunner)._running)
    return folder


def content_of(store, path, what):
    """What a named path holds, as its readers see it."""
    place = store.folder / path
    if path.startswith("files/"):
        return hashlib.sha256(b"".join(store.contents.pieces(place.name))).hexdigest()
    if path.startswith("jobs/") and path.count("/") == 1:
        folder = JobFolder(store.folder, place.name)
        digests = store.database.read(lambda one: held_data(one, place.name)).result()
        folder.check_data(digests)
        checkpoints = CheckpointStore(folder.checkpoints)
        found, _ = last_good(checkpoints.candidates(), lambda one: checkpoints.load(one, "a"))
        return f"goes on from {found.name}"
    if what.startswith("state of") or "/weights/" in what:
        return digest_of(CheckpointStore(place.parent).load(place, "a").adapter)
    return digest_of(read_adapter(place, "a"))


def outcomes(folder):
    """What each path that a row names holds, or the error of who reads it; or that of the start."""
    found = {}
    try:
        with open_store(folder) as store:
            named = store.database.read(named_paths).result()
            for path, what in named.items():
                try:
                    found[path] = content_of(store, path, what)
                except PcgError as error:
                    found[path] = f"error: {error}"
    except ServeError as error:
        return {"": f"error: {error}"}
    return found


def held(folder):
    """The contents in a folder that are somebody's, wherever they are."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return Counter(sha256_of(p) for p in files if not OWN.fullmatch(str(p.relative_to(folder))))


def files_of(folder):
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


@pytest.fixture(scope="module")
def expected(made, tmp_path_factory):
    found = outcomes(shutil.copytree(made, tmp_path_factory.mktemp("whole") / "data"))
    assert len(found) >= 9
    assert not any(text.startswith("error") for text in found.values())
    return found


def check_damaged(made, expected, folder, one):
    """Damage a file of a copy: nothing else is lost, nothing is wrong, and repair opens it."""
    shutil.copytree(made, folder)
    file, how, place = one
    before = held(folder) - Counter({sha256_of(folder / file): 1})
    damage(folder / file, how, place)
    said = []
    wrong = check_folder(folder, said.append, repairs=False)
    found = outcomes(folder)
    assert not before - held(folder), one
    assert found.keys() in ({""}, expected.keys()), one
    earlier = {f"goes on from {path.name}" for path in made.glob("jobs/*/checkpoints/step-*")}
    for path, told in found.items():
        if not told.startswith("error"):
            assert told == expected[path] or told in earlier, (one, told)
        elif path:
            assert Path(file).name in told, (one, told)
        else:
            assert "pcg data check" in told, (one, told)
    assert wrong or found == expected, (one, said)
    check_folder(folder, said.append, repairs=True)
    assert not before - held(folder), (one, said)
    assert check_folder(folder, said.append, repairs=False) == 0, (one, said)
    assert not any(text.startswith("error") for text in outcomes(folder).values()), (one, said)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 5))]
)
def test_no_damage_is_silent_or_spreads(made, expected, tmp_path, seed):
    files = [file for file in files_of(made) if not re.search("/record/|tinker_runs/", file)]
    for number, one in enumerate(damages(made, files, seed)):
        if seed or number % 5 == 0:
            check_damaged(made, expected, tmp_path / "data", one)
            shutil.rmtree(tmp_path / "data")


@pytest.mark.parametrize("leaves_folder", [True, False])
def test_an_adapter_without_its_files_and_their_checksums(made, tmp_path, leaves_folder):
    """Absence of SHA256SUMS is no pass for a folder that lacks what it is for."""
    folder = shutil.copytree(made, tmp_path / "data")
    (model,) = folder.glob("jobs/*/model")
    shutil.rmtree(model)
    if leaves_folder:
        model.mkdir()
    said = []
    assert check_folder(folder, said.append, repairs=False) == 1
    assert re.fullmatch(r"model ft:\S+: .*/model(/adapter_config.json)? is missing", said[0])
    check_folder(folder, said.append, repairs=True)
    assert check_folder(folder, said.append, repairs=False) == 0


def test_a_server_tells_of_damage_and_others_go_on(made, tmp_path):
    folder = shutil.copytree(made, tmp_path / "data")
    kept = {path.read_bytes(): path for path in folder.glob("files/*/*")}
    flipped, gone = (kept[f"content {number}\n".encode() * 40] for number in range(2))
    damage(flipped, "flip", 77)
    damage(gone, "gone", 0)
    (model,) = folder.glob("jobs/*/model")
    damage(model / "adapter_model.safetensors", "flip", 9999)
    newest = max(folder.glob("jobs/*/checkpoints/step-*/optimizer.safetensors"))
    damage(newest, "flip", 9999)
    damage(newest.parents[1] / "latest", "gone", 0)
    (state,) = folder.glob("tinker/*/trainer_state.json")
    damage(state, "cut", 100)
    with (
        tinker_client.server(folder) as server,
        client_of(server.url, tinker_client.KEY) as client,
        tinker_client.client(server.url) as service,
    ):
        files = {one.filename: one.id for one in client.files.list()}
        for name, path in (("0.txt", flipped), ("1.txt", gone)):
            with pytest.raises(
                openai.InternalServerError, match=f"{path.name} is damaged"
            ) as error:
                client.files.content(files[name])
            assert error.value.code == "storage_damaged"
            with pytest.raises(openai.InternalServerError, match="from a copy, or upload it again"):
                begin(client, training_file=files[name])
            client.files.delete(files[name])
        assert client.files.content(files["2.txt"]).content == b"content 2\n" * 40
        over = next(job for job in client.fine_tuning.jobs.list() if job.fine_tuned_model)
        with pytest.raises(openai.BadRequestError, match=r"model.safetensors is damaged: the SHA"):
            text(client, str(over.fine_tuned_model))
        checkpoints = list(client.fine_tuning.jobs.checkpoints.list(over.id))
        assert text(client, checkpoints[1].fine_tuned_model_checkpoint)
        paused = newest.parents[2].name
        client.fine_tuning.jobs.resume(paused)
        until(lambda: client.fine_tuning.jobs.retrieve(paused).status == "running")
        begun = [one.message for one in events(client, paused) if "resumed" in one.message]
        assert f"{newest.parent.name}/optimizer.safetensors is damaged" in begun[-1]
        step = int(re.findall(r"resumed after step (\d+);", begun[-1])[0])
        assert 0 < step < int(newest.parent.name.removeprefix("step-"))
        seen = len(steps(client, paused))
        until(lambda: len(steps(client, paused)) > seen)
        client.fine_tuning.jobs.cancel(paused)
        row = "SELECT path FROM tinker_checkpoints WHERE kind = 'weights'"
        read = server.service.part(Files).store.database.read
        (path,) = read(lambda one: one.execute(row).fetchone()).result()
        with pytest.raises(tinker.RequestFailedError, match=r"trainer_state.json is damaged"):
            service.create_training_client_from_state(path).result(60)
