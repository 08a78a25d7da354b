"""tinker-cookbook's trainers by Tinker's protocol: supervised, reinforcement, DPO, distillation.

`make test-cookbook` installs them and runs this.
"""

import json

import pytest

from tests.support.other_clients import CHECKPOINT, ROOT, client_program, run_client, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KEY = "tml-a-key-of-the-tests"


def test_the_librarys_trainers_run_unchanged(tmp_path):
    python = client_program("cookbook", "python")
    named = ("--served-model-name", str(CHECKPOINT), "--tinker-tokenizer", str(CHECKPOINT))
    kept = ("--data-dir", str(tmp_path / "data"), "--api-key", KEY)
    with served(tmp_path / "log", (), (*named, *kept)) as server:
        printed = run_client(
            [python, str(ROOT / "tests" / "clients" / "cookbook_calls.py")],
            tmp_path,
            timeout_s=1500,
            PCG_URL=f"{server.url}/tinker",
            PCG_MODEL=str(CHECKPOINT),
            TINKER_API_KEY=KEY,
            TINKER_TELEMETRY="0",
            OMP_NUM_THREADS="1",
        )
    found = json.loads(printed.splitlines()[-1])
    metrics = found["metrics"]
    losses = [row["train_mean_nll"] for row in metrics["supervised"] if "train_mean_nll" in row]
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]
    assert {"state_path", "sampler_path"} <= found["checkpoints"][-1].keys()
    rewards = [row for row in metrics["rl"] if "env/all/reward/total" in row]
    assert len(rewards) == 2
    for row in rewards:  # sampled and trained logprobs are those of the same weights
        assert abs(row["optim/kl_sample_train_v1"]) < 1e-5
    margins = [row["margin"] for row in metrics["dpo"] if "margin" in row]
    assert len(margins) == 6
    assert margins[-1] > margins[0]
    late = [row for row in metrics["async"] if "env/all/reward/total" in row]
    assert len(late) == 2
    gaps = [row["teacher_kl"] for row in metrics["on-policy"] if "teacher_kl" in row]
    assert len(gaps) == 2
    losses = [row["train/loss:sum"] for row in metrics["off-policy"] if "train/loss:sum" in row]
    assert len(losses) == 2
    assert min(losses) > 0
