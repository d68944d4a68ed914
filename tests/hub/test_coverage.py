"""Which weights cover which machine: described machines and targets in, verdicts with reasons out."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from spoil import edit

from pretune.errors import WeightsError
from pretune.features.schema import SCHEMA_VERSION
from pretune.hardware import Hardware
from pretune.hub.coverage import judge
from pretune.hub.sources import Considered, Offer, consider, find_weights, offer_in
from pretune.model.weights import Config, Software

DATA = json.loads((Path(__file__).parent / "machines.json").read_text())
HERE = Software("0.1.0", "0.27.0")


def config(**about: object) -> Config:
    """Configuration of weights, with what every one of them has in common."""
    common = {
        "format_version": 1,
        "min_sdk_version": "0.1.0",
        "tvm": ">=0.26,<0.28",
        "feature_schema": SCHEMA_VERSION,
        "onnx": {"opset": 18, "ir": 10},
        "sizes": {},
        "quality": {"top1": 0.7, "top5": 0.9, "spearman": 0.7},
    }
    return msgspec.convert(common | about, Config, strict=False)


def machine(name: str, **changes: object) -> Hardware:
    (found,) = (m["hardware"] for m in DATA["machines"] if m["name"] == name)
    return msgspec.convert(found | changes, Hardware)


def considered(hardware: Hardware) -> list[Considered]:
    configs = [config(**target) for target in DATA["targets"]]
    return consider(hardware, [Offer("hub", c.name, Path(), c) for c in configs], HERE)


@pytest.mark.parametrize("described", DATA["machines"], ids=[m["name"] for m in DATA["machines"]])
def test_a_described_machine(described):
    found = considered(msgspec.convert(described["hardware"], Hardware))
    verdicts = {item.verdict.name: item.verdict for item in found}
    assert len(verdicts) == len(DATA["targets"])
    for name, expected in described["expect"].items():
        verdict = verdicts[name]
        assert (verdict.coverage, verdict.accepted) == (expected["coverage"], expected["accepted"]), name
        assert list(verdict.reasons) == expected["reasons"]
    best = found[0].verdict
    assert (best.name if best.coverage != "uncovered" else None) == described["best"]


@pytest.mark.parametrize(
    ("software", "reason"),
    [
        (Software("0.0.9", "0.27.0"), "weights need pretune 0.1.0 or newer, this is 0.0.9"),
        (Software("0.1.0", "0.28.0"), "weights for apache-tvm >=0.26,<0.28, but 0.28.0 is installed"),
        (
            Software("0.1.0", "0.27.0", SCHEMA_VERSION + 1),
            f"weights for feature schema {SCHEMA_VERSION}, this pretune computes {SCHEMA_VERSION + 1}",
        ),
    ],
)
def test_versions_reject_what_the_hardware_accepts(software, reason):
    verdict = judge(machine("Zen 4"), config(**DATA["targets"][0]), software)
    assert (verdict.accepted, verdict.coverage, verdict.reasons) == (False, "uncovered", (reason,))
    assert judge(machine("Zen 4"), config(**DATA["targets"][0]), Software("0.1.0", None)).accepted


def test_unknown_levels():
    covers = {"kind": "cpu", "arch": "x86_64", "isa_level": "x86-64-v9"}
    verdict = judge(machine("Zen 4"), config(name="new", covers=covers, measured_on=[]), HERE)
    assert not verdict.accepted and verdict.reasons[0].startswith("for x86-64-v9, a level of x86_64 that")
    target = config(**DATA["targets"][0])
    verdict = judge(machine("Zen 4", isa_level="x86-64-v9"), target, HERE)
    assert verdict.accepted and verdict.reasons == ("for x86-64-v4, the level here is unknown",)
    any_level = config(name="any", covers=covers | {"isa_level": ""}, measured_on=[])
    assert judge(machine("Zen 2"), any_level, HERE).described == "compatible: any x86_64"


def test_the_closest_of_weights_that_do_not_cover_comes_first():
    found = [item.verdict.name for item in considered(machine("Westmere", isa_level="x86-64", isa=[]))]
    assert found[:3] == ["cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4"]
    found = [item.verdict.name for item in considered(machine("Ice Lake"))]
    assert found[:3] == ["cpu-x86-64-v4", "cpu-x86-64-v3", "cpu-x86-64-v2"]


def test_of_two_that_cover_alike_the_nearer_source_is_used():
    target = config(**DATA["targets"][0])
    offers = [Offer(source, target.name, Path(source), target) for source in ("hub", "wheel", "own", "cache")]
    found = consider(machine("Zen 4"), offers, HERE)
    assert [item.offer.source for item in found] == ["own", "cache", "wheel", "hub"]


def test_of_two_measured_on_a_microarchitecture_those_with_as_many_cores_are_used():
    here = machine("Zen 4")
    measured = DATA["targets"][0]["measured_on"][0] | {"microarch": here.microarch}
    offers = [
        Offer(
            "own",
            name,
            Path(name),
            config(**DATA["targets"][0] | {"name": name, "measured_on": [measured | {"cores": n}]}),
        )
        for name, n in (("a", here.cores + 1), ("b", here.cores))
    ]
    assert [item.offer.name for item in consider(here, offers, HERE)] == ["b", "a"]


def test_a_folder_that_cannot_be_read_is_listed_with_the_reason(folder):
    edit(folder, format_version=7)
    offer = offer_in(folder, "own")
    (item,) = consider(machine("Zen 4"), [offer], HERE)
    assert not item.verdict.accepted and "weights format 7, this pretune reads 1" in item.verdict.reasons[0]


def test_weights_that_do_not_cover_are_used_with_a_notice(weights):
    v3 = machine("Zen 2")
    for found in (find_weights(v3), find_weights(v3, weights)):
        assert "cpu-x86-64-v4 do not cover this target (for x86-64-v4, this is x86-64-v3)" in found.notice
    assert find_weights(machine("Skylake-X")).notice == ""


def test_where_nothing_covers_the_ways_on_are_named():
    with pytest.raises(WeightsError) as caught:
        find_weights(machine("H100"))
    said = str(caught.value)
    assert said.startswith("no weights for sm_90 (sm_90): cpu-x86-64-v4: for cpu x86_64, this is cuda sm_90")
    assert "--weights" in said and "pretune finetune" in said and "ms.tune_relax" in said
    assert "'cuda -arch=sm_90'" in said and "\n" not in said
