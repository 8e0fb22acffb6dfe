"""Configuration: defaults, files, overrides, and errors that name the key."""

from pathlib import Path

import pytest

from lf_meta.config import Config, config_origins, load_config
from lf_meta.errors import ConfigError


def test_no_file_and_no_overrides_is_the_default_job() -> None:
    assert load_config() == Config()
    assert Config().model.size == "tiny"


def test_override_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim:\n  lr: 1e-4\n  warmup: 7\nrun:\n")
    config = load_config(str(file), ["optim.lr=5e-5"])
    assert (config.optim.lr, config.optim.warmup, config.optim.clip) == (5e-5, 7, 1.0)
    origins = config_origins(str(file), ["optim.lr=5e-5"])
    assert origins["optim.lr"] == (5e-5, "command line")
    assert origins["optim.warmup"] == (7, str(file))
    assert origins["optim.clip"] == (1.0, "default")


def test_dotted_keys_are_accepted_in_files(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("optim.warmup: 3\n")
    assert load_config(str(file)).optim.warmup == 3


def test_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    import yaml

    config = load_config(None, ["model.args.layers=6", "data.path=x.txt", "optim.betas=[0.8,0.9]"])
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(config.to_dict()))
    assert load_config(str(file)) == config


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("optim.lrr=1", "optim.lrr", "nearest is optim.lr"),
        ("ckpt.keep=0", "ckpt.keep", "greater than 0"),
        ("ckpt.keep=true", "ckpt.keep", "greater than 0"),
        ("ckpt.keep=[]", "ckpt.keep", "list of rules"),
        ("ckpt.keep=[{lats: 3}]", "ckpt.keep", "no rule 'lats'"),
        ("ckpt.keep=[{last: 0}]", "ckpt.keep", "0"),
        ("ckpt.keep=[{any: [{last: 1}, {best: {metric: loss}}]}]", "ckpt.keep", "saves no metrics"),
        ("optimm.lr=1", "optimm.lr", "nearest is optim.lr"),
        ("modle.size=tiny", "modle.size", "nearest is model.size"),
        ("optim.lr=fast", "optim.lr", "fast"),
        ("optim.lr=-1", "optim.lr", "greater than 0"),
        ("optim.lr=.nan", "optim.lr", "finite"),
        ("run.steps=0", "run.steps", "greater than 0"),
        ("run.steps=2.5", "run.steps", "2.5"),
        ("data.eval_fraction=1", "data.eval_fraction", "less than 1"),
        ("loader.backend=grain", "loader.backend", "iouring"),
        ("optim=3", "optim", ""),
        ("optim.lr.peak=3", "optim.lr.peak", ""),
        ("justaword", "justaword", "key=value"),
        ("=3", "=3", "key=value"),
        ("optim.lr=[", "optim.lr", "YAML"),
        ("optim.min_lr_ratio=1", "optim.min_lr_ratio", "less than 1"),
        ("batch.accum=3", "batch.accum", "multiple of batch.accum"),
    ],
)
def test_every_wrong_override_names_its_key(override: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r".") as caught:
        load_config(None, [override])
    assert caught.value.key == key
    assert caught.value.exit_code == 2
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "- a\n- b\n",
        "optim: [1, 2\n",
        "optim:\n  lr: 1\n  lr: 2\n",
        "just text",
        "optim: &a\n  lr: *b\n",
        "\x00",
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(file))


def test_missing_and_undecodable_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / "absent.yaml"))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(str(tmp_path / "b.yaml"))


def test_yaml_tags_cannot_run_code(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run: !!python/object/apply:os.system ['touch pwned']\n")
    with pytest.raises(ConfigError):
        load_config(str(file))


def test_retention_may_be_rules_as_data() -> None:
    config = load_config(None, ["ckpt.keep=[{last: 3}, {every: 1000}]"])
    assert config.ckpt.keep == [{"last": 3}, {"every": 1000}]
    assert Config.model_validate(config.to_dict()) == config
    with pytest.raises(ConfigError, match="backend=lf"):
        load_config(None, ["ckpt.keep=[{last: 3}]", "ckpt.backend=torch"])
