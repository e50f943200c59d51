"""The monitor's numbers are those of a scripted server with two engines: sums, maxima, rates, windows, percentiles, unknowns."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentguard.events import ArmReport, EconomicsReport, RatioReport
from agentguard.monitor.clock import steady
from agentguard.monitor.feed import Feed
from agentguard.monitor.model import Model
from agentguard.monitor.snapshot import Snapshot
from agentguard.monitor.windows import KEPT, Growth, History, Ring, merged, percentile, quantile
from agentguard.telemetry import exposition
from tests.monitor_rig import GATEWAY, SERVER, Clock, Engine, Watched, finished, ready, text


def two() -> dict[str, Engine]:
    """3 + 12 running, the KV cache at 12 % and 72 %."""
    return {"0": Engine(running=3, waiting=1, kv=0.12), "1": Engine(running=12, waiting=0, kv=0.72)}


def grown(engines: dict[str, Engine], seconds: float) -> None:
    """100 + 500 tokens a second, and what goes with them."""
    for engine, per_s in zip(engines.values(), (100, 500), strict=True):
        engine.tokens_out += per_s * seconds
        engine.tokens_in += 1000 * seconds
        engine.cached += 750 * seconds


def test_a_servers_engines_are_a_row_each_with_their_own_numbers() -> None:
    w, engines = Watched(), two()
    for _ in range(3):
        w.scrape(text(engines))
        w.clock.t += 2
        grown(engines, 2)
    rows = w.model.snapshot().engines
    assert [(row.key, row.running, row.waiting, row.kv_use) for row in rows] == [
        (f"{SERVER}#0", 3, 1, 0.12), (f"{SERVER}#1", 12, 0, 0.72),
    ]  # fmt: skip
    assert [(row.tokens_out_per_s, row.tokens_in_per_s, row.tokens_in_computed_per_s, row.window_s) for row in rows] == [
        (100.0, 1000.0, 250.0, 4.0), (500.0, 1000.0, 250.0, 4.0),
    ]  # fmt: skip


def test_a_gateways_engine_is_the_sum_of_its_labels_and_the_fullest_cache() -> None:
    w, engines = Watched(), two()
    w.model.take(GATEWAY, ready())
    for _ in range(2):
        w.scrape(text(engines), GATEWAY)
        w.clock.t += 2
        grown(engines, 2)
    (row,) = [row for row in w.model.snapshot().engines if row.source == GATEWAY]
    assert (row.running, row.kv_use, row.tokens_out_per_s, row.waiting) == (15, 0.72, 600.0, 1)


def test_a_rate_needs_two_samples_and_is_not_0_before() -> None:
    w, engines = Watched(), two()
    grown(engines, 3600)  # an hour before we looked is no rate
    w.scrape(text(engines))
    row = w.row(f"{SERVER}#0")
    assert (row.tokens_out_per_s, row.tokens_in_per_s, row.window_s, row.preemptions_per_s) == (None, None, None, None)
    w.clock.t += 1
    w.scrape(text(engines))
    row = w.row(f"{SERVER}#0")
    assert (row.tokens_out_per_s, row.window_s, row.preemptions_per_s) == (0.0, 1.0, 0.0)


def test_what_a_server_does_not_export_is_unknown() -> None:
    w = Watched()
    for _ in range(2):
        w.scrape('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0\n')
        w.clock.t += 1
    row = w.row(f"{SERVER}#0")
    assert row.running == 0
    unknown = (
        "waiting", "kv_use", "tokens_out_per_s", "accepted_length", "ttft_p50_s", "ttlt_p50_s", "think_share", "closes", "steps",
        "gain", "length_ratio", "rounds_ratio", "prefix_hit_share", "acceptance_share", "rejections_per_s", "arm",
    )  # fmt: skip
    assert {name: getattr(row, name) for name in unknown} == dict.fromkeys(unknown)
    (spec,) = w.model.snapshot().speculation
    assert (spec.rounds, spec.accepted_length, spec.by_position, spec.probability, spec.tts) == (0, None, (), (), None)


def test_a_restart_of_the_server_is_no_negative_rate() -> None:
    w, engines = Watched(), {"0": Engine()}
    for total in (10_000, 10_100, 40, 140):  # it began anew between the second and the third sample
        engines["0"].tokens_out = total
        w.scrape(text(engines))
        w.clock.t += 1
    row = w.row(f"{SERVER}#0")
    assert row.tokens_out_per_s == pytest.approx((100 + 40 + 100) / 3)
    (line,) = [line for line in w.model.snapshot().events if line.kind == "restart"]
    assert line.text == "m server:8000#0 began anew: its counters fell" or line.text == "m began anew: its counters fell"


def test_a_counter_that_is_already_past_its_old_value_still_counts_from_0_when_another_fell() -> None:
    growth = Growth()
    growth.take({"a": 100.0, "b": 5.0})
    assert growth.take({"a": 10.0, "b": 8.0})
    assert growth.grown == {"a": 10.0, "b": 8.0}


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), min_size=2, max_size=30))
def test_growth_never_falls_and_is_at_least_what_the_last_run_counted(samples: list[tuple[float, float]]) -> None:
    growth, before = Growth(), {"a": 0.0, "b": 0.0}
    for i, (a, b) in enumerate(samples):
        reset = growth.take({"a": a, "b": b})
        assert all(growth.grown[name] >= before[name] for name in before)
        assert reset == (i > 0 and (a < samples[i - 1][0] or b < samples[i - 1][1]))
        before = dict(growth.grown)


def test_more_engines_than_there_can_be_are_refused() -> None:
    lines = "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(300))
    with pytest.raises(ValueError, match="more than 256"):
        exposition.read("# TYPE vllm:num_requests_running gauge\n" + lines, 1.0)


def test_an_engine_that_dies_goes_stale_and_down_and_the_other_stays() -> None:
    w, engines = Watched(SERVER), two()
    w.scrape(text(engines))
    alive = {"0": engines["0"]}
    states = []
    for _ in range(14):
        w.clock.t += 1
        engines["0"].tokens_out += 1
        w.scrape(text(alive))
        states.append([row.state for row in w.model.snapshot().engines])
    assert [one for one, _ in states] == ["ok"] * 14
    assert [other for _, other in states] == ["ok"] * 4 + ["stale"] * 5 + ["down"] * 5
    assert w.model.snapshot().verdict.text.startswith("m server:8000#1 is down since 4 s: the server tells nothing of engine '1'")
    w.scrape(text(engines))
    assert [row.state for row in w.model.snapshot().engines] == ["ok", "ok"]


def test_a_row_that_is_down_keeps_its_numbers_and_says_their_age() -> None:
    w, engines = Watched(), {"0": Engine(running=4)}
    for _ in range(2):
        w.scrape(text(engines))
        w.clock.t += 1
        engines["0"].tokens_out += 50
    seen = w.clock.t - 1
    w.clock.t += 100
    row = w.row(f"{SERVER}#0")
    assert (row.state, row.running, row.tokens_out_per_s, row.seen_t) == ("down", 4, 50.0, seen)


def test_speculation_from_the_engines_counters() -> None:
    w, engines = Watched(), {"0": Engine(drafts=1000, drafted=4000, accepted_at=[900, 800, 700, 600])}
    w.scrape(text(engines))
    w.clock.t += 10
    engines["0"].drafts += 100
    engines["0"].drafted += 400
    engines["0"].accepted_at = [900 + 80, 800 + 50, 700 + 20, 600 + 10]
    w.scrape(text(engines))
    row = w.row(f"{SERVER}#0")
    assert row.accepted_length == pytest.approx(1.6)  # the bonus token is never counted
    assert row.acceptance_share == pytest.approx(0.4)
    (spec,) = w.model.snapshot().speculation
    assert spec.by_position == pytest.approx((0.8, 0.5, 0.2, 0.1))
    assert (spec.rounds, spec.accepted, spec.strict_accepted_length, spec.window_s) == (100, 160, None, 10.0)


def test_positions_are_in_the_order_of_their_numbers() -> None:
    w, engines = Watched(), {"0": Engine(drafts=1, accepted_at=[0.0] * 12)}
    w.scrape(text(engines))
    engines["0"].drafts += 100
    engines["0"].accepted_at = [float(100 - i) for i in range(12)]
    w.clock.t += 1
    w.scrape(text(engines))
    (spec,) = w.model.snapshot().speculation
    assert spec.by_position == tuple((100 - i) / 100 for i in range(12))


def test_finish_reasons_are_taken_as_they_come() -> None:
    w, engines = Watched(), {"0": Engine(finished=dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 5.0))}
    w.scrape(text(engines))
    engines["0"].finished |= {"repetition": 8.0, "stop": 6.0, "something_new": 2.0}
    w.clock.t += 1
    w.scrape(text(engines))
    assert w.row(f"{SERVER}#0").finish_reasons == (("repetition", 3), ("something_new", 2), ("stop", 1))


def test_rejections_have_no_engine_and_are_not_counted_to_one_of_several() -> None:
    for engines, expected in (({"0": Engine()}, 2.0), (two(), None)):
        w = Watched()
        w.scrape(text(engines, rejections=3))
        w.scrape(text(engines, rejections=3))
        w.clock.t += 2
        w.scrape(text(engines, rejections=7))
        assert {row.rejections_per_s for row in w.model.snapshot().engines} == {expected}


def test_percentiles_are_of_the_windows_deltas_merged_over_engines() -> None:
    w = Watched()
    engines = {"0": Engine(ttft=[1000, 0, 0, 0, 0]), "1": Engine(ttft=[0, 0, 0, 0, 1000])}  # long before the window
    w.model.take(GATEWAY, ready())
    w.scrape(text(engines), GATEWAY)
    w.clock.t += 5
    engines["0"].ttft = [1000 + 4, 4, 0, 0, 0]
    engines["1"].ttft = [0, 0, 8, 4, 1000]
    w.scrape(text(engines), GATEWAY)
    # 20 requests: 4 to 0.1 s, 8 to 0.2 s, 16 to 0.5 s, 20 to 1 s; the 10th is 2 of 8 into (0.2, 0.5], the 19th 3 of 4 into (0.5, 1]
    row = w.row(GATEWAY)
    assert row.ttft_p50_s == pytest.approx(0.2 + 0.3 * 2 / 8)
    assert row.ttft_p95_s == pytest.approx(0.5 + 0.5 * 3 / 4)
    w.clock.t += 5
    w.scrape(text(engines), GATEWAY)
    assert w.row(GATEWAY).ttft_p50_s == pytest.approx(0.2 + 0.3 * 2 / 8)
    w.clock.t += 58  # only the last sample and a new one are in the window: nothing was counted since
    w.scrape(text(engines), GATEWAY)
    assert w.row(GATEWAY).ttft_p50_s is None


def test_quantiles_by_hand() -> None:
    assert quantile({1.0: 0.0, None: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 10.0, 2.0: 10.0, None: 10.0}, 0.5) == pytest.approx(0.5)
    assert quantile({1.0: 0.0, 2.0: 10.0, None: 10.0}, 0.25) == pytest.approx(1.25)
    assert quantile({1.0: 5.0, 2.0: 5.0, None: 10.0}, 0.99) == 2.0  # behind the last bound: at least that
    assert merged([{1.0: 1.0, 2.0: 2.0, None: 3.0}, {2.0: 4.0, None: 4.0}]) == {2.0: 6.0, None: 7.0}
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.25, 0.5, 0.75, 0.95)] == [1.0, 2.0, 3.0, 4.0]
    assert percentile([], 0.5) is None


def test_times_of_steps_and_their_shares() -> None:
    w = Watched()
    w.model.take(GATEWAY, ready())
    for i in range(20):
        w.model.take(GATEWAY, finished("s", i + 1, think=60, answer=38, ttlt_s=float(i + 1), closed="budget" if i < 3 else ""))
    row = w.row(GATEWAY)
    assert (row.ttlt_p50_s, row.ttlt_p95_s, row.steps, row.closes, row.think_share) == (10.0, 19.0, 20, 3, 0.6)
    w.clock.t += 62
    w.model.take(GATEWAY, finished("s", 21, ttlt_s=5.0))
    row = w.row(GATEWAY)
    assert (row.ttlt_p50_s, row.steps, row.closes) == (5.0, 1, 0)


def test_a_window_says_what_it_really_covers() -> None:
    w, engines = Watched(window_s=30), {"0": Engine()}
    spans = []
    for _ in range(45):
        w.scrape(text(engines))
        spans.append(w.row(f"{SERVER}#0").window_s)
        w.clock.t += 1
    assert spans[:3] == [None, 1.0, 2.0]
    assert spans[-1] == 30.0


def test_a_history_keeps_few_samples_however_often_it_is_fed() -> None:
    history = History(60.0)
    for i in range(60_000):
        history.add(i / 100, {"a": float(i)})
    assert len(history) <= KEPT + 5
    assert history.rate("a") == pytest.approx(100.0)


def test_a_ring_forgets_what_is_older_than_its_window() -> None:
    ring: Ring[list[int]] = Ring(60.0, list)
    for t in range(200):
        ring.at(float(t)).append(t)
    kept = [t for slot in ring.slots(199.0) for t in slot]
    assert kept[-1] == 199
    assert 59 <= len(kept) <= 61
    assert ring.slots(1000.0) == []


# -- the exposition ----------------------------------------------------------------------------------------------------------------


def test_labels_with_commas_quotes_and_braces_are_read() -> None:
    model = 'org/a "quoted", braced {model}\\ 1'
    (event,) = exposition.read(text({"0": Engine(running=2, finished={"stop, or so": 3})}, model=model), 1.0)
    assert (event.model, event.engine, event.gauges["running"]) == (model, "0", 2.0)
    assert event.counters["finished/stop, or so"] == 3.0


def test_names_are_matched_whole() -> None:
    """`prompt_tokens` is in `prompt_tokens_by_source`, and `iteration_tokens_total` is a histogram."""
    (event,) = exposition.read(text({"0": Engine(tokens_in=100, cached=70, waiting=1)}), 1.0)
    assert event.counters["tokens_in"] == 100.0
    assert event.counters["tokens_in_from/local_compute"] == 30.0
    assert event.gauges["waiting"] == 1.0  # and not also those by reason
    assert not any("iteration" in name for name in (*event.counters, *event.buckets))


def test_several_models_of_an_engine_are_one() -> None:
    both = text({"0": Engine(running=2, kv=0.3, tokens_out=5)}, model="a") + text(
        {"0": Engine(running=1, kv=0.5, tokens_out=2)}, model="b"
    )
    (event,) = exposition.read(both, 1.0)
    assert (event.gauges["running"], event.gauges["kv_use"], event.counters["tokens_out"]) == (3.0, 0.5, 7.0)


def test_what_is_not_a_number_is_unknown() -> None:
    assert exposition.read('# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0"} NaN\n', 1.0) == []


@pytest.mark.parametrize("wrong", ["<html>not found</html>", '{"error": 1}'])
def test_what_is_no_exposition_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is no sample"):
        exposition.read(wrong, 1.0)


# -- the economics -----------------------------------------------------------------------------------------------------------------


def arm(**more: object) -> ArmReport:
    ratios = {
        "tokens": RatioReport(value=1.86, low=1.4, high=None, n=60), "rounds": RatioReport(value=1.16, low=1.02, high=1.3, n=60),
        "ttlt": None,
    }  # fmt: skip
    given: dict[str, object] = {
        "workload": "w", "arm": "cactus:delta=0.25,p_min=0.1,top_k=10", "on": True, "since": 0.0, "verdict": "undecided",
        "reason": "", "baseline": "live control", "sessions": 60, "steps": 100, "censored": 0, "ratios": ratios, "gain": 1.61,
    }  # fmt: skip
    return ArmReport(**(given | more))  # type: ignore[arg-type]


def test_the_lead_arm_is_a_losing_one_else_the_one_with_most_steps() -> None:
    w = Watched()
    control = arm(arm="strict", verdict="control", steps=1000)
    small, big = arm(arm="cactus:delta=1", verdict="loss", steps=5), arm(steps=50)
    for rows, lead in (([control, big], big), ([control, big, small], small), ([control], control)):
        w.model.take(GATEWAY, EconomicsReport(t=0, rows=rows))
        assert w.row(GATEWAY).arm == lead.arm
    w.model.take(GATEWAY, EconomicsReport(t=0, rows=[arm(on=False, verdict="loss")]))
    row = w.row(GATEWAY)
    assert (row.rule, row.gain) == ("strict", 1.61)
    assert row.length_ratio is not None
    assert math.isinf(row.length_ratio.high)
    assert row.ttlt_ratio is None


@pytest.mark.parametrize(("looks_s", "every_s"), [(0.25, 1.0), (0.6, 1.2), (5.0, 5.0), (10.0, 10.0)])
def test_the_strip_chart_says_how_far_apart_its_points_are(looks_s: float, every_s: float) -> None:
    w = Watched(GATEWAY, interval_s=looks_s)
    w.model.take(GATEWAY, ready())
    assert w.model.snapshot().series[0].every_s == max(1.0, looks_s)
    for _ in range(40):
        w.clock.t += looks_s
        w.model.heard(GATEWAY)
        (series,) = w.model.snapshot().series
    assert series.every_s == pytest.approx(every_s)
    assert series.points[-1].t - series.points[0].t == pytest.approx(series.every_s * (len(series.points) - 1))


def test_the_strip_chart_has_no_rate_without_a_sample_and_no_peak_after_an_outage() -> None:
    w, engines = Watched(SERVER), {"0": Engine(), "1": Engine()}
    rates = []
    for second in range(40):
        for engine in engines.values():
            engine.tokens_out += 50
        if not 5 <= second < 35:
            w.scrape(text(engines))
        rates.append(w.model.snapshot().series[0].points[-1].tokens_out_per_s)
        w.clock.t += 1
    assert rates == [None] + [50.0] * 4 + [None] * 30 + [50.0] * 5


def test_the_clock_goes_on_when_the_wall_clock_is_set_back() -> None:
    wall, passed = Clock(5000.0), Clock(70.0)
    now = steady(wall, passed)
    assert now() == 5000.0
    wall.t, passed.t = 1400.0, 80.0  # an hour back while 10 s pass
    assert now() == 5010.0


def test_a_monitor_keeps_its_windows_when_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    feed = Feed(model)
    model.add_source(GATEWAY, "gateway")
    feed.take(GATEWAY, [ready(), finished()])
    before = model.snapshot().t
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    feed.take(GATEWAY, [finished("s", 2)])
    shown = model.snapshot()
    assert shown.t >= before
    assert shown.engines[0].steps == 2
    assert feed.clock() >= before


def test_a_server_whose_clock_is_set_back_is_measured_anew() -> None:
    history = History(60.0)
    for t, value in ((1000.0, 0.0), (1010.0, 100.0), (400.0, 150.0), (410.0, 250.0)):
        history.add(t, {"a": value})
    assert (history.span_s(), history.rate("a")) == (10.0, 10.0)


def test_the_strip_chart_has_a_point_a_second_and_none_for_what_was_unknown() -> None:
    w = Watched()

    def look() -> Snapshot:
        w.clock.t += 1
        return w.model.snapshot()

    w.model.take(GATEWAY, ready())
    look()
    for _ in range(3):
        w.model.take(GATEWAY, EconomicsReport(t=0, rows=[arm()]))
        shown = look()
        assert w.model.snapshot().series == shown.series  # twice in a second is one point
    for _ in range(7):  # silence: stale after 5 s
        shown = look()
    points = shown.series[0].points
    assert [p.t for p in points] == [1001.0 + i for i in range(11)]
    assert [p.length_ratio for p in points] == [None] + [1.86] * 6 + [None] * 4
    assert {p.accepted_length for p in points} == {None}
