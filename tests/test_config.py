"""Settings from defaults, a file and flags."""

from pathlib import Path

import pytest

from lapclip.config import SETTINGS, Config, load_config, to_toml
from lapclip.errors import UserError
from lapclip.units import is_due


def write(text: str) -> Path:
    path = Path("settings.toml")
    path.write_text(text, "utf-8")
    return path


def test_a_file_wins_over_defaults_and_flags_win_over_the_file():
    file = write('[train]\nbatch_size = 64\nlr = 1\n[model]\nsize = "nano"\n')
    config = load_config(file, {"batch_size": 32})
    assert (config.train.batch_size, config.train.lr, config.model.size) == (32, 1.0, "nano")
    assert config.train.warmup == Config().train.warmup


def test_all_five_mistakes_of_a_file_are_named():
    file = write(
        """
        minutes = 3
        [train]
        batchsize = 64
        lr = "fast"
        warmup = 2.0
        [model]
        size = "tinny"
        """
    )
    with pytest.raises(UserError) as caught:
        load_config(file)
    message = caught.value.message
    assert "5 mistakes" in message
    assert "`minutes` is not a section; it belongs under [train]" in message
    assert "`train.batchsize` is not a setting; did you mean `batch_size`?" in message
    assert "`train.lr` is `fast`, not a number" in message
    assert "`train.warmup` is 2.0, more than 0.9" in message
    assert "`model.size` is `tinny`" in message and "did you mean `tiny`?" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("steps", 1.5), ("steps", True), ("minutes", -1.0), ("minutes", float("nan")), ("lr", "1e-3"),
     ("batch_size", 1), ("save_every", "soon"), ("save_every", "0"), ("save_every", "-5m"), ("save_every", ""),
     ("loss", "mse"), ("device", "tpu"), ("keep_patches", 0.0), ("source", 3), ("recompute", "yes"), ("lr", 0.0)],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=SETTINGS[name].flag):
        load_config(flags={name: value})


def test_every_number_has_a_minimum_and_a_maximum():
    for setting in SETTINGS.values():
        if setting.type in (int, float):
            low, high = setting.field.metadata["low"], setting.field.metadata["high"]
            assert setting.problem(low) is None and setting.problem(high) is None, setting.name
            for value in (low - 1, high * 2 + 1, setting.type(1e300), -(10**4000)):
                assert setting.problem(value), (setting.name, value)


def test_a_budget_replaces_the_one_in_the_file_and_contradictions_are_refused():
    file = write("[train]\nminutes = 3.0\n")
    train = load_config(file, {"steps": 10}).train
    assert (train.minutes, train.epochs, train.steps) == (None, None, 10)
    with pytest.raises(UserError, match="both budgets"):
        load_config(flags={"steps": 10, "minutes": 1.0})
    with pytest.raises(UserError, match="not a multiple"):
        load_config(flags={"image_size": 60, "patch_size": 16})


DEEP = "[train]\nlr = " + "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "[train",
        "\xff\xfe",
        "train = 3",
        "[train]\nsteps = 5\nsteps = 6",
        DEEP,
        "[train]\nlr = 0x" + "f" * 9000,
    ],
)
def test_a_file_that_is_not_toml_is_an_error_with_a_hint(text):
    with pytest.raises(UserError) as caught:
        load_config(write(text))
    assert caught.value.hint
    with pytest.raises(UserError, match=r"`nowhere\.toml`"):
        load_config(Path("nowhere.toml"))


def test_what_is_written_reads_back_equal():
    source = 'odd "name" \\ \u00e9 \U0001f984 \x7f \x01\n'
    config = load_config(flags={"steps": 7, "lr": 1e-7, "source": source, "recompute": True})
    assert load_config(write(to_toml(config))) == config


def test_every_counts_steps_or_training_time():
    assert is_due("500", 500, 0) and not is_due("500", 499, 1e9)
    assert is_due("5m", 0, 300) and not is_due("5m", 10**9, 299)
    assert is_due("1.5h", 0, 5400) and is_due("90s", 0, 90)


def test_a_percentage_may_end_in_its_sign():
    for written in ("20%", "20", "0%", "100%", "12.5%"):
        assert load_config(flags={"pause_below": written}).train.pause_below == written
    for written in ("twenty", "-1%", "101%", "20%%", "nan", "", "0.2"):
        with pytest.raises(UserError, match=r"pause-below.*not a percentage such as `20%`"):
            load_config(flags={"pause_below": written})


def test_a_setting_may_be_given_by_another_name():
    config = load_config(write("[train]\nlearning_rate = 0.5\n"), {"color": 0.25})
    assert (config.train.lr, config.data.colour) == (0.5, 0.25) and "lr = 0.5" in to_toml(config)
    with pytest.raises(UserError, match=r"`data\.learning_rate` .* it belongs under \[train\]"):
        load_config(write("[data]\nlearning_rate = 0.5\n"))
