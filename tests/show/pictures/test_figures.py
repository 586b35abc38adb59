"""Pictures of plans: what stands in them, that it is true, and that it can be read."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib
import pytest
from hypothesis import given, settings

from helpers.command import PACED, assert_mistake, command
from helpers.strategies import MEBIBYTE, layer_profile, model_profile, planned_problems
from planaria.core.plan import Pipeline, PipelineTemplate, Plan, Stage, plain_plan
from planaria.planner.plans import (
    pipeline_microbatches,
    plan_bubble_share,
    plan_iteration_s,
    rebuilt_catalog,
)
from planaria.planner.problem import Problem
from planaria.planner.times import PlainTimes
from planaria.schedule.action import FORWARD
from planaria.show.alike import alike_pipelines
from planaria.show.pictures.figures import plan_figure
from planaria.show.pictures.page import PLOT_LEFT_PT, PLOT_WIDTH_PT, Font, Format, Page
from planaria.show.pictures.timelines import (
    Lanes,
    TimeWindow,
    drawn_lanes,
    lane_boxes,
    lane_reductions,
    time_windows,
)
from planaria.show.words import seconds_text

MIB_SVG_MAX = 2
PROFILE = str(PACED.with_name("paced-profile.json"))


def even_template(num_layers: int, num_stages: int, *, num_nodes: int) -> PipelineTemplate:
    """Stages of as equal layers as can be, on one device each."""
    cuts = [num_layers * index // num_stages for index in range(num_stages + 1)]
    return PipelineTemplate(tuple(Stage(*cut, 1) for cut in pairwise(cuts)), num_nodes)


def example(
    *stages: int, microbatches: Sequence[int], num_layers: int = 12, memory_bytes: int = 0
) -> tuple[Problem, Plan]:
    """A plan with a pipeline of so many stages each, on nodes of one device."""
    layers = tuple(
        layer_profile(f"layer {index}", 0.001 * (3 + index % 4), output_bytes=MEBIBYTE)
        for index in range(num_layers)
    )
    problem = Problem(
        profile=model_profile(layers, device_memory_bytes=memory_bytes),
        devices_per_node=1,
        num_microbatches=sum(microbatches),
        failures_tolerated=0,
    )
    nodes = iter(range(sum(stages)))
    pipelines = tuple(
        Pipeline(even_template(num_layers, n, num_nodes=n), tuple(next(nodes) for _ in range(n)))
        for n in stages
    )
    return problem, plain_plan(0, pipelines, tuple(microbatches))


def shared_nodes() -> tuple[Problem, Plan]:
    """Two pipelines of two nodes of two devices, which stages share."""
    layers = tuple(layer_profile(f"layer {i}", 0.01, device_counts=(1, 2)) for i in range(6))
    template = PipelineTemplate((Stage(0, 1, 1), Stage(1, 3, 1), Stage(3, 6, 2)), 2)
    problem = Problem(
        profile=model_profile(layers, device_memory_bytes=256 * MEBIBYTE),
        devices_per_node=2,
        num_microbatches=8,
        failures_tolerated=1,
    )
    pipelines = (Pipeline(template, (0, 2)), Pipeline(template, (1, 3)))
    return problem, plain_plan(0, pipelines, (4, 4))


def costless() -> tuple[Problem, Plan]:
    """Layers that take no time and hold nothing."""
    problem, plan = example(1, microbatches=[2], num_layers=2)
    layer = layer_profile("none", 0.0, parameter_bytes=0, activation_bytes=0)
    return replace(problem, profile=model_profile((layer, layer))), plan


@cache
def plans() -> dict[str, tuple[Problem, Plan]]:
    """From the smallest to the largest, with everything that leaves something out."""
    many = range(1, 13)
    return {
        "one stage": example(1, microbatches=[1], num_layers=1),
        "two pipelines": example(3, 4, microbatches=[9, 13], memory_bytes=1 << 28),
        "alike": example(2, 2, 2, 3, microbatches=[6, 6, 7, 6]),
        "shared nodes": shared_nodes(),
        "costless": costless(),
        "many": example(*many, microbatches=[2 * n for n in many]),
        "large": example(64, microbatches=[768], num_layers=96),
        "narrow": example(200, microbatches=[100], num_layers=1000),
        "four long": example(20, 21, 22, 23, microbatches=[90, 91, 92, 93], num_layers=40),
    }


def figure(problem: Problem, plan: Plan, *, picture: Format = "svg") -> bytes:
    """The picture of a plan alone: what failures would leave is not in it."""
    return plan_figure(rebuilt_catalog(problem, {}, {}), plan, picture=picture)


@cache
def svg_of(name: str) -> bytes:
    """The picture of one of `plans`, which many tests look at."""
    return figure(*plans()[name])


class Words(NamedTuple):
    """Text in a picture and the points that it takes, from left to right and from top to bottom."""

    text: str
    left: float
    right: float
    top: float
    bottom: float


def words_of(svg: bytes) -> list[Words]:
    """Every text of a picture, in the font that it was measured with."""
    page = Page()
    found = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        text = element.text or ""
        style = dict(part.split(": ", 1) for part in element.attrib["style"].split("; "))
        size_pt = float(style["font-size"].removesuffix("px"))
        bold = style.get("font-weight") == "700"
        width = page.text_width(text, Font(size_pt, weight="bold" if bold else "normal"))
        shift = {"start": 0.0, "middle": width / 2, "end": width}[style["text-anchor"]]
        left, baseline = float(element.attrib["x"]) - shift, float(element.attrib["y"])
        found.append(Words(text, left, left + width, baseline - 0.73 * size_pt, baseline))
    return found


def joined(svg: bytes) -> str:
    return "\n".join(words.text for words in words_of(svg))


@pytest.mark.parametrize("name", plans())
def test_no_text_overlaps_another_or_leaves_the_page(name: str) -> None:
    """All that is measured is for this; viewers with narrower fonts are safe too."""
    svg = svg_of(name)
    found = words_of(svg)

    width, height = (float(n) for n in re.findall(rb'viewBox="0 0 (\S+) (\S+)"', svg)[0])
    assert all(w.left >= 0 and w.right <= width and w.bottom <= height for w in found)
    found.sort(key=lambda words: words.top)
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            if other.top >= one.bottom - 0.5:
                break
            assert one.right <= other.left or other.right <= one.left, (one, other)


@pytest.mark.parametrize("name", plans())
def test_a_picture_is_small_enough_to_send(name: str) -> None:
    """64 stages with 768 microbatches have 98,304 boxes."""
    size_bytes = len(svg_of(name))

    assert size_bytes < MIB_SVG_MAX * MEBIBYTE


@pytest.mark.parametrize("picture", ["svg", "png", "pdf"])
def test_the_same_plan_gives_the_same_bytes_whatever_the_users_settings_are(
    picture: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture in a repository changes only if the plan does; and the settings stay."""
    first = figure(*plans()["alike"], picture=picture)
    monkeypatch.setitem(matplotlib.rcParams, "font.size", 20.0)
    monkeypatch.setitem(matplotlib.rcParams, "font.style", "italic")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "path")
    before = dict(matplotlib.rcParams)

    second = figure(*plans()["alike"], picture=picture)

    assert first == second
    assert before == dict(matplotlib.rcParams)
    assert first.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[picture])


def test_a_picture_says_what_the_plan_is() -> None:
    """Pipelines that do the same stand there once."""
    text = joined(svg_of("shared nodes"))

    assert "layers\n" in text
    assert "2 nodes" in text
    for part in (
        "6 layers, float32 on cpu; 4 nodes of 2 devices, 8 microbatches of 2 samples",
        "2 pipelines of 2 nodes",
        "nodes 0-3",
        "nodes 0-1",
        "nodes 2-3",
        "layers 1-2 \u00d71",
        "layers 3-5 \u00d72",
        "4 microbatches each",
        "of 256.0 MiB",
        "% bubbles",
    ):
        assert part in text, part


def test_a_name_may_hold_anything() -> None:
    """A model is called what its user calls it: no formulas, no markup, no control characters."""
    problem, plan = plans()["one stage"]
    model = "a$^2$ <b>&\x00\n" + "long " * 100
    named = replace(problem, profile=replace(problem.profile, model=model))

    text = joined(figure(named, plan))

    assert "a$^2$ <b>&  long long" in text


def test_what_is_left_out_is_named() -> None:
    """A picture that leaves out something in silence is wrong."""
    many = joined(svg_of("many")).replace("\n", " ")
    large = joined(svg_of("large"))
    narrow = joined(svg_of("narrow"))

    assert "The stages of 1 pipeline of 9 nodes (18 microbatches), " in many
    assert "The timelines of 1 pipeline of 5 nodes (10 microbatches), " in many
    assert many.count("12 nodes (24 microbatches)") == 2
    assert "s in the middle of the time are cut out, from " in large
    assert "stages left out" in narrow


@settings(max_examples=20)
@given(planned_problems())
def test_boxes_of_a_lane_are_as_long_as_its_stage_computes(
    planned_problems: tuple[Problem, dict[int, PipelineTemplate], Plan],
) -> None:
    """That of each microbatch, one forward and one backward; none overlaps the next."""
    problem, _, plan = planned_problems
    for one in drawn_lanes(alike_pipelines(problem.profile, plan)):
        whole = TimeWindow(0.0, one.computed_s, 0.0, 1.0)
        for stage, stage_s in enumerate(one.group.stages_s):
            boxes = sorted(lane_boxes(one, stage, [whole]), key=lambda box: box.start_s)

            busy_s = sum(box.end_s - box.start_s for box in boxes)
            assert busy_s == pytest.approx(one.group.num_microbatches * stage_s)
            forwards = [box.microbatch for box in boxes if box.kind is FORWARD]
            backwards = [box.microbatch for box in boxes if box.kind is not FORWARD]
            assert forwards == backwards == list(range(one.group.num_microbatches))
            assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(boxes))


@settings(max_examples=20)
@given(planned_problems())
def test_reductions_of_a_lane_follow_its_last_backward(
    planned_problems: tuple[Problem, dict[int, PipelineTemplate], Plan],
) -> None:
    """One after the other, up to the end of the iteration but for the commit; each of them stands
    on one lane of every pipeline."""
    problem, _, plan = planned_problems
    templates = [pipeline.template for pipeline in plan.pipelines]
    iteration = PlainTimes(problem).iteration(templates, pipeline_microbatches(plan))

    for one in drawn_lanes(alike_pipelines(problem.profile, plan)):
        lanes = [list(lane_reductions(s, iteration)) for s in one.group.template.stages]
        for stage, reductions in enumerate(lanes):
            ends_s = [one.ends.backward_s[stage].max(), *(r.end_s for r in reductions)]
            starts_s = [reduction.start_s for reduction in reductions]
            pairs = zip(ends_s, [*starts_s, iteration.end_s], strict=True)
            assert all(start_s >= end_s - 1e-9 for end_s, start_s in pairs)
        shown = [reduction for reductions in lanes for reduction in reductions]
        assert len(shown) == len(iteration.reductions)
        assert set(shown) == set(iteration.reductions)


@pytest.mark.parametrize("name", ["alike", "two pipelines", "large"])
def test_the_picture_has_the_iteration_that_the_command_prints(name: str) -> None:
    """The commit after the last reduction ends there, at the right edge."""
    problem, plan = plans()[name]
    iteration_s = plan_iteration_s(plan, PlainTimes(problem))
    drawn, windows = windows_for(name)

    svg = svg_of(name)

    assert windows[-1].end_s == iteration_s
    assert windows[-1].place(iteration_s) == pytest.approx(PLOT_LEFT_PT + PLOT_WIDTH_PT)
    assert max(one.computed_s for one in drawn) < iteration_s
    text = joined(svg)
    assert f"{seconds_text(iteration_s)} an iteration" in text
    bubbles = plan_bubble_share(plan, PlainTimes(problem))
    assert f"samples/s, {100 * bubbles:.1f}% bubbles" in text


def windows_for(name: str) -> tuple[tuple[Lanes, ...], tuple[TimeWindow, ...]]:
    problem, plan = plans()[name]
    drawn = drawn_lanes(alike_pipelines(problem.profile, plan))
    return drawn, time_windows(drawn, plan_iteration_s(plan, PlainTimes(problem)))


def test_a_short_iteration_is_shown_whole() -> None:
    """A cut hides what little there is."""
    _, windows = windows_for("two pipelines")

    assert [(window.left, window.width) for window in windows] == [(PLOT_LEFT_PT, PLOT_WIDTH_PT)]


@pytest.mark.parametrize("name", ["large", "four long"])
def test_a_long_iteration_is_cut_in_the_middle_and_keeps_its_scale(name: str) -> None:
    """Both ends are shown, at one scale; the last one with its reductions."""
    drawn, windows = windows_for(name)

    first, last = windows
    computed_s = max(one.computed_s for one in drawn)
    assert first.start_s == 0.0
    assert first.end_s < last.start_s
    assert first.end_s == pytest.approx(computed_s - last.start_s)
    scales = [(window.end_s - window.start_s) / window.width for window in windows]
    assert scales[0] == pytest.approx(scales[1])
    assert first.left == PLOT_LEFT_PT
    assert first.left + first.width < last.left
    assert last.left + last.width == pytest.approx(PLOT_LEFT_PT + PLOT_WIDTH_PT)


def test_the_command_draws_beside_its_table_and_its_json(tmp_path: Path) -> None:
    """What a script reads stays as it is."""
    table = command("plan", PROFILE, "--nodes", "3", "--plot", str(tmp_path / "a.svg"))
    as_json = command("plan", PROFILE, "--nodes", "3", "--json", "--plot", str(tmp_path / "b.PNG"))

    assert "Pipeline templates" in table.output
    assert json.loads(as_json.output)["plan"]
    assert "paced" in joined((tmp_path / "a.svg").read_bytes())
    assert (tmp_path / "b.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("plan.docx", ".svg, .png, .pdf"),
        ("plan", ".svg, .png, .pdf"),
        ("svg", ".svg, .png, .pdf"),
        ("absent/plan.svg", "a writable directory"),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused(tmp_path: Path, name: str, remedy: str) -> None:
    """Before planning, which may take minutes."""
    result = command("plan", "missing.json", "--nodes", "3", "--plot", str(tmp_path / name))

    assert_mistake(result, "--plot", remedy)


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an extra; whoever does not draw does not need it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    result = command("plan", "missing.json", "--nodes", "3", "--plot", str(tmp_path / "a.svg"))
    plain = command("plan", PROFILE, "--nodes", "3")

    assert_mistake(result, "--plot", "pip install -e '.[plots]'")
    assert plain.exit_code == 0
