"""Pretrained models and texts of Hugging Face, from local folders, with the real library."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray_pool import Pool, play

from fedsweep.api import load_model, run
from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError, DataError, InputError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.models.huggingface import PretrainedModel, pretrained
from fedsweep.parameters.signature import signature_of
from fedsweep.testing import local_engine, run_rounds
from fedsweep.world.data.datasets import load_dataset
from fedsweep.world.data.record import Dataset
from fedsweep.world.data.torchvision_compat import import_transformers

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("transformers", "datasets")), reason="they come with the extra hf"
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(16))]
SMALL = {"vocab_size": len(WORDS)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders ``bert`` and ``gpt2``: tiny models with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    library, place = import_transformers(), tmp_path_factory.mktemp("models")
    table = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    table.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = library.PreTrainedTokenizerFast(tokenizer_object=table, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    bert = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    library.BertModel(library.BertConfig(**SMALL, **bert, max_position_embeddings=8)).save_pretrained(place / "bert")
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 2, "eos_token_id": 3}
    library.GPT2LMHeadModel(library.GPT2Config(**SMALL, **gpt2)).save_pretrained(place / "gpt2")
    for name in ("bert", "gpt2"):
        tokenizer.save_pretrained(place / name)
    return place


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Texts of 3 to 7 words by four speakers; the label says whether one has w1."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    draws, lines = np.random.default_rng(0), []
    for number in range(60):
        words = [f"w{word}" for word in draws.integers(0, 16, draws.integers(3, 8))]
        row = {"text": " ".join(words), "label": "yes" if "w1" in words else "no", "speaker": f"s{number % 4}"}
        lines.append(json.dumps(row))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.jsonl").write_text("\n".join(lines))
    return tmp_path / "texts"


def load(name: object) -> Dataset:
    return load_dataset(f"hf:{name}", root=None, download=False)


def tree(models: Path, texts: Path, **changes: Any) -> dict[str, Any]:
    dataset = f"hf:{texts}?text=text&label=label&writer=speaker&tokenizer={models}/bert&length=6"
    return {
        "scenario": {"dataset": dataset, "clients": 4, "partition": {"kind": "writer"}},
        "model": {"name": f"hf:{models}/bert", "adapter": {"kind": "lora", "rank": 2, "targets": ["query"]}},
        "training": {"rounds": 2, "cohort_size": 2, "local_steps": 2, "batch_size": 4},
        "tracking": {"uri": "none"},
    } | changes


def test_an_adapter_on_a_pretrained_model_travels_alone(models: Path, texts: Path, tmp_path: Path) -> None:
    result = run(tree(models, texts), out=tmp_path / "run")
    values = 2 * 8 * 2
    assert result.summary["num_params"] == values
    sent = result.summary["total_bytes"] - result.summary["registration_bytes"]
    assert sent == 2 * 2 * 2 * 4 * values  # rounds, clients, both ways
    module = load_model(tmp_path / "run")
    ids = torch.arange(12).reshape(2, 6)
    assert module({"input_ids": ids, "attention_mask": torch.ones_like(ids)}).shape == (2, 2)


def test_a_run_keeps_the_hash_of_the_pretrained_values_and_refuses_others(models: Path, texts: Path) -> None:
    resolved = resolve(load_config(tree(models, texts))).tree()
    assert len(resolved["model"]["sha256"]) == 64
    resolved["model"]["name"] = f"hf:{models}/gpt2"
    with pytest.raises(ConfigError, match=r"model\.sha256 is .*it is another model"):
        run(resolved)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_model_gives_what_transformers_gives(models: Path, name: str) -> None:
    library = import_transformers()
    model = pretrained(str(models / name))(input_shape=(6,), num_classes=20, outputs=(6, 20))
    assert isinstance(model, PretrainedModel)
    config = library.AutoConfig.from_pretrained(models / name)
    config.is_decoder = True
    torch.manual_seed(3)
    theirs = library.AutoModelForCausalLM.from_pretrained(models / name, config=config, attn_implementation="eager")
    theirs.load_state_dict({**theirs.state_dict(), **_turned(model, theirs)})
    ids = torch.arange(12).reshape(2, 6)
    torch.testing.assert_close(model.eval()(ids), theirs.eval()(input_ids=ids).logits, rtol=1e-6, atol=1e-6)


def _turned(ours: PretrainedModel, theirs: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Our values under their names; GPT-2's layers have their weights turned there."""
    values = ours.model.state_dict()
    linear = {f"{path}.weight" for path, layer in theirs.named_modules() if type(layer).__name__ == "Conv1D"}
    return {name: value.t() if name in linear else value for name, value in values.items()}


def test_texts_are_ids_with_a_mask_and_the_next_token_where_nothing_else_is_learned(models: Path, texts: Path) -> None:
    data = load(f"{texts}?text=text&writer=speaker&tokenizer={models}/gpt2&length=6")
    rows = [json.loads(line) for line in (texts / "train.jsonl").read_text().splitlines()]
    assert len(data.train) + len(data.test) == 60 and data.num_classes == len(WORDS)
    ids, mask, targets = data.train.inputs["input_ids"], data.train.inputs["attention_mask"], data.train.targets
    coded = {tuple(WORDS.index(word) for word in row["text"].split()[:6]) for row in rows}
    for line, seen, wanted in zip(ids, mask.astype(bool), targets, strict=True):
        assert tuple(line[seen]) in coded
        assert wanted[: seen.sum() - 1].tolist() == line[1 : seen.sum()].tolist()
        assert set(wanted[seen.sum() - 1 :]) == {-100}
    assert set(data.train.groups) == {0, 1, 2, 3}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its reader of csv leaves a file open
def test_labels_of_texts_and_columns_of_numbers(models: Path, texts: Path, tmp_path: Path) -> None:
    data = load(f"{texts}?text=text&label=label&tokenizer={models}/bert&length=8")
    assert data.class_names == ("no", "yes")
    has_w1 = (data.train.inputs["input_ids"] == WORDS.index("w1")).any(axis=1)
    assert data.train.targets.tolist() == has_w1.astype(int).tolist()

    (tmp_path / "rows").mkdir()
    lines = [f"{number},{number / 4},{number * 0.5}" for number in range(40)]
    (tmp_path / "rows" / "all.csv").write_text("\n".join(["a,b,y", *lines]))
    rows = load(f"{tmp_path / 'rows'}?columns=b,a&label=y")
    assert rows.train.targets.dtype == np.float32 and rows.num_classes == 0
    assert np.array_equal(rows.train.inputs, np.stack([rows.train.targets / 2, rows.train.targets * 2], axis=1))
    classes = load(f"{tmp_path / 'rows'}?columns=b&label=a")
    assert classes.num_classes == 40 and classes.train.targets.dtype == np.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("text=txt", "unknown column 'txt'"),
        ("text=text&tokenizer={models}/none", "there is no tokenizer's folder"),
        ("text=text", "say tokenizer=FOLDER"),
        ("text=text&tokenizer={models}/bert&length=1", "length must be an integer of 2 to 65536, but is 1"),
        ("columns=text&label=label", "the column text must hold numbers"),
        ("columns=label&label=label", "the column label is learned"),
        ("columns=text", "which column is learned"),
        ("txt=text", "unknown option 'txt'"),
    ],
)
def test_options_that_are_wrong_are_named(models: Path, texts: Path, options: str, message: str) -> None:
    complete = options if "tokenizer" in options or "text=text" in options else f"{options}&tokenizer={models}/bert"
    with pytest.raises(DataError, match=message):
        load(f"{texts}?{complete.format(models=models)}")


def test_a_row_without_a_text_is_named(models: Path, texts: Path) -> None:
    with (texts / "train.jsonl").open("a") as file:
        file.write('\n{"text": null, "label": "no", "speaker": "s0"}')
    with pytest.raises(DataError, match=r"1 of 61 rows .* no value, the first is row 61"):
        load(f"{texts}?text=text&label=label&tokenizer={models}/bert&length=8")


def test_folders_without_a_model_are_refused(models: Path, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    code = {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "code" / "config.json").write_text(json.dumps(code))
    (tmp_path / "code" / "evil.py").write_text("raise SystemExit('ran')")
    cases = {
        "hf:bert": "is no local folder",
        f"hf:{tmp_path}/nothing": "is not there",
        f"hf:{texts}": "has no config.json",
        f"hf:{tmp_path}/code": "can't be loaded",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            run(tree(models, texts, model={"name": name}))
    with pytest.raises(ConfigError, match="has 20 words"):
        pretrained(str(models / "bert"))(input_shape=(6,), num_classes=9, outputs=(6, 9))


def adapters(models: Path, texts: Path, name: str, executor: str = "loop") -> Experiment:
    """The text's label by BERT, or GPT-2's next word, with adapters."""
    changed = tree(models, texts, runtime={"backend": "local", "executor": executor})
    if name == "gpt2":
        dataset = f"hf:{texts}?text=text&writer=speaker&tokenizer={models}/gpt2&length=6"
        changed["scenario"] |= {"dataset": dataset, "task": {"kind": "next_token"}}
        changed["model"] = {"name": f"hf:{models}/gpt2", "adapter": {"kind": "lora", "rank": 2, "targets": ["c_attn"]}}
    return plan_run(load_config(changed)).experiment


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", set()),
        ("bert", {"the network, or the method, goes by the values of one client (an if over a tensor)"}),
    ],
)
def test_lanes_are_the_loop_or_leave_it_to_it(models: Path, texts: Path, name: str, said: set[str]) -> None:
    alone = run_rounds(local_engine(adapters(models, texts, name)))
    engine = local_engine(adapters(models, texts, name, "lanes"))
    together = run_rounds(engine)
    fleet = engine.fleet
    assert isinstance(fleet, LocalFleet) and fleet._worker._lanes is not None
    assert {*fleet._worker._lanes._notes} == {f"lanes: {why}: clients are stepped one by one" for why in said}
    torch.testing.assert_close(alone.vector, together.vector, atol=0 if said else 1e-7, rtol=0)
    assert not torch.equal(alone.vector, engine.experiment.initial_vector)


def test_an_actor_can_be_sent_the_builder(models: Path) -> None:
    from ray import cloudpickle

    sent = cloudpickle.loads(cloudpickle.dumps(pretrained(str(models / "bert"))))
    assert {*signature_of(sent)} == {"input_shape", "num_classes", "outputs", "sha256", "dtype"}
    assert sent(input_shape=(6,), num_classes=2, outputs=(2,))(torch.zeros(1, 6, dtype=torch.int64)).shape == (1, 2)


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_actors_give_the_bits_of_one_process(pool: Pool, models: Path, texts: Path, name: str) -> None:
    experiment = adapters(models, texts, name)
    found, _ = play(pool, experiment, 2)
    here = run_rounds(local_engine(experiment))
    assert torch.equal(found.vector, here.vector)
    assert [r.test_loss for r in found.records] == [r.test_loss for r in here.records]
