"""Robot samples become batches of gr00t_n16_vla: every number in its place, scaled, padded and masked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lf_format as lff
from lf_iouring import LoongDataLoader
from lf_meta.errors import DataError
from lf_meta.models import gr00t_vla
from lf_meta.models.gr00t_vla_batch import check_batch
from lf_meta.models.gr00t_vla_config import VLAConfig
from lf_meta.models.gr00t_vla_data import RobotInputs, Scale

EPISODES, HORIZON, TEXT = (5, 3), 4, 16
CONFIG: VLAConfig = gr00t_vla.config_for("tiny", None, {"horizon": HORIZON})
META: dict[str, Any] = {
    "cameras": {"ego": {}, "wrist": {}},
    "action_horizon": HORIZON,
    "stats": {
        "observation.state": {"min": [-2.0, 0.0, 1.0], "max": [2.0, 10.0, 1.0]},
        "action": {"min": [-1.0, 0.0], "max": [1.0, 4.0]},
    },
}
FIELDS = [
    lff.Field.image("ego", (32, 32, 3)),
    lff.Field.image("wrist", (32, 32, 3)),
    lff.Field.tensor("state", "float32", (3,)),
    lff.Field.tensor("action", "float32", (HORIZON, 2)),
    lff.Field.bits("action_mask", (HORIZON,)),
    lff.Field.tokens("tokens"),
]


def state(episode: int, t: int) -> list[float]:
    return [episode - 0.5 * t, 2.0 * t, 1.0]


def action(episode: int, t: int) -> list[float]:
    return [0.1 * t, 4.0 - t]


def sample(episode: int, t: int) -> dict[str, Any]:
    last = EPISODES[episode] - 1
    steps = np.arange(t, t + HORIZON)
    return {
        "ego": np.full((32, 32, 3), 10 * episode + t, np.uint8),
        "wrist": np.full((32, 32, 3), 100 + t, np.uint8),
        "state": np.array(state(episode, t), np.float32),
        "action": np.array([action(episode, min(s, last)) for s in steps], np.float32),
        "action_mask": steps <= last,
        "tokens": np.arange(1, 4 + 5 * episode),
    }


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Episodes of 5 and 3 frames, in lf-format's robot fields."""
    path = tmp_path_factory.mktemp("robot") / "a.lfg"
    tokenizer = lff.TokenizerInfo("demo", "00")
    with lff.Writer(
        path, fields=FIELDS, vocab_size=256, buckets=(16,), tokenizer=tokenizer, meta=META
    ) as writer:
        for e, length in enumerate(EPISODES):
            for t in range(length):
                writer.append(sample(e, t), None, t == 0, t == length - 1)
    with lff.open_dataset(path) as opened:
        yield opened


def load(dataset: lff.Dataset, inputs: RobotInputs, rows: int, **options: Any) -> dict[str, Tensor]:
    with LoongDataLoader(dataset, global_batch=rows, epochs=1, shuffle=False, **options) as loader:
        return {k: v.clone() for k, v in inputs(next(iter(loader))).items()}


def test_every_value_is_scaled_and_in_its_place(dataset: lff.Dataset) -> None:
    inputs = RobotInputs(CONFIG, dataset.meta, TEXT, embodiment=3)
    batch = load(dataset, inputs, 8)
    check_batch(CONFIG, batch)
    rows = [(e, t) for e, length in enumerate(EPISODES) for t in range(length)]
    images = CONFIG.image_tokens
    for row, (e, t) in enumerate(rows):
        assert batch["pixel_values"][row, :, 0, 0, 0].tolist() == [10 * e + t, 100 + t]
        a, b, _ = state(e, t)
        # -2..2 and 0..10 to -1..1; the third never changes; the rest is padding
        assert batch["state"][row, 0].tolist() == pytest.approx([a / 2, b / 5 - 1, 0] + [0] * 5)
        ids = batch["input_ids"][row].tolist()
        text = list(range(1, 4 + 5 * e))
        assert ids == [CONFIG.image_token] * images + text + [0] * (TEXT - len(text))
        assert batch["lengths"][row] == images + len(text)
        for k in range(HORIZON):
            real = t + k < EPISODES[e]
            x, y = action(e, t + k)
            assert batch["action_mask"][row, k].tolist() == [real] * 2 + [False] * 6
            assert batch["action"][row, k].tolist() == pytest.approx(
                [x, y / 2 - 1] * real + [0] * (8 - 2 * real)
            )
    assert batch["embodiment_id"].tolist() == [3] * 8


def test_rows_that_fill_up_the_last_batch_are_empty(dataset: lff.Dataset) -> None:
    batch = load(dataset, RobotInputs(CONFIG, dataset.meta, TEXT), 12)
    assert batch["lengths"][8:].tolist() == [0] * 4
    assert not batch["action_mask"][8:].any()
    check_batch(CONFIG, batch)
    torch.manual_seed(0)
    model = gr00t_vla.build("tiny", horizon=HORIZON).eval()
    noise, time = torch.randn_like(batch["action"]), torch.rand(12)
    whole = model(batch, noise=noise, time=time)
    real = model({k: v[:8] for k, v in batch.items()}, noise=noise[:8], time=time[:8])
    assert whole[0].item() == pytest.approx(real[0].item(), rel=1e-5)
    assert whole[1] == real[1]


class Rows(dict[str, Tensor]):
    """Samples by hand."""

    def __init__(self, ids: list[int], lengths: list[int], **fields: Tensor) -> None:
        super().__init__(fields)
        self.ids, self.lengths = torch.tensor(ids), torch.tensor(lengths)


def test_nothing_of_an_empty_row_counts_whatever_its_memory_holds() -> None:
    rows = Rows(
        [4, -1],
        [2, 0],
        ego=torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
        wrist=torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
        state=torch.ones(2, 3, 3),
        action=torch.ones(2, HORIZON, 2),
        action_mask=torch.ones(2, HORIZON, dtype=torch.bool),
        tokens=torch.ones(2, 3, dtype=torch.int32),
    )
    batch = RobotInputs(CONFIG, META, TEXT)(rows)
    check_batch(CONFIG, batch)
    assert batch["lengths"].tolist() == [CONFIG.image_tokens + 2, 0]
    for mask in ("action_mask", "next_state_mask"):
        assert batch[mask].flatten(1).any(1).tolist() == [True, False]


def test_later_frames_give_next_states_inside_the_episode(dataset: lff.Dataset) -> None:
    inputs = RobotInputs(CONFIG, dataset.meta, TEXT)
    batch = load(dataset, inputs, 8, deltas={"state": [0, 1, 2]})
    assert batch["next_state"].shape == batch["next_state_mask"].shape == (8, 2, 8)
    for row, (e, t) in enumerate((e, t) for e, length in enumerate(EPISODES) for t in range(length)):
        for k in (0, 1):
            real = t + k + 1 < EPISODES[e]
            assert batch["next_state_mask"][row, k].tolist() == [real] * 3 + [False] * 5
            if real:
                a, b, _ = state(e, t + k + 1)
                assert batch["next_state"][row, k, :2].tolist() == pytest.approx([a / 2, b / 5 - 1])
    plain = load(dataset, inputs, 8)
    assert torch.equal(plain["state"], batch["state"])
    assert "next_state" not in plain


def test_a_scale_and_its_inverse_cancel() -> None:
    scale = Scale([-1.0, 5.0, 2.0], [3.0, 6.0, 2.0])
    values = torch.tensor([[0.0, 5.5, 2.0], [3.0, 6.0, 2.0]])
    assert scale(values).tolist() == [[-0.5, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert torch.equal(scale.inverse(scale(values)), values)


def test_nothing_is_read_back(dataset: lff.Dataset) -> None:
    inputs = RobotInputs(CONFIG, dataset.meta, TEXT)

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "equal")
            return func(*args, **(kwargs or {}))

    with LoongDataLoader(dataset, global_batch=4, epochs=1, deltas={"state": [0, 1]}) as loader:
        for samples in loader:
            with Refuse():
                inputs(samples)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"cameras": {"ego": {}}}, {}, "takes 2 cameras, and these are ego"),
        ({}, {"cameras": ("ego",)}, "takes 2 cameras, and these are ego"),
        ({"action_horizon": 16}, {}, "actions are 16 steps, and the model predicts 4"),
        ({"relative_actions": ["all"]}, {}, "give relative ones an action_scale"),
        ({"stats": {}}, {}, "no min and max of 'observation.state'"),
        ({}, {"state_scale": Scale([0.0] * 9, [1.0] * 9)}, "state has 9 dimensions, and the model 8"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(
    change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        RobotInputs(CONFIG, META | change, TEXT, **options)
    RobotInputs(CONFIG, META | {"relative_actions": ["all"]}, TEXT, action_scale=Scale([-1.0], [1.0]))


def test_tasks_that_could_be_longer_than_the_text_length_are_refused(dataset: lff.Dataset) -> None:
    with pytest.raises(DataError, match="padded to 16, and text_length is 15"):
        load(dataset, RobotInputs(CONFIG, dataset.meta, 15), 8)
