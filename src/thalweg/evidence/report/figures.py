"""The report's figures, in plotly; the page sets the colors of text and ground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

Record = Mapping[str, Any]

# Okabe and Ito's colors, lightened where they would vanish on a dark ground.
PALETTE = ("#e8590c", "#1c8fd6", "#0ca678", "#d6a100", "#c4699f", "#7a8ef0", "#8a9a3c", "#a0785a")
THRESHOLD = "#d6336c"
NEUTRAL = "#86909a"


def figures(record: Record) -> dict[str, go.Figure]:
    """Return the figures of a claim's page by title, those that its data allows."""
    found = {
        "Effect": effect_figure(record),
        "Curves": curve_figure(record),
        "Sweep": sweep_figure(record),
        "Seeds": seed_figure(record),
        "Tuning": tuning_figure(record),
    }
    return {title: figure for title, figure in found.items() if figure is not None}


def effect_figure(record: Record) -> go.Figure | None:
    """Show the effect against each contender with its interval, and the limits of the claim."""
    expectation = record["expectation"]
    if expectation["effect"] in ("value", "slope"):
        rows = [(record["contenders"][0]["name"], record["effect"])]
        title = "slope" if expectation["effect"] == "slope" else _metric(record)
    else:
        rows = [(c["name"], c["effect"]) for c in record["contenders"][1:]]
        title = f"{expectation['effect']} of {record['contenders'][0]['name']} to the contender"
    rows = [(name, effect) for name, effect in rows if effect and effect["value"] is not None]
    if not rows:
        return None
    figure = go.Figure(
        go.Scatter(
            x=[effect["value"] for _, effect in rows],
            y=[name for name, _ in rows],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [_gap(effect["high"], effect["value"]) for _, effect in rows],
                "arrayminus": [_gap(effect["value"], effect["low"]) for _, effect in rows],
                "color": NEUTRAL,
                "thickness": 2,
                "width": 6,
            },
            mode="markers",
            marker={
                "size": 11,
                "color": [THRESHOLD if n == record["of"] else PALETTE[1] for n, _ in rows],
            },
            hovertemplate="%{y}: %{x:.4g}<extra></extra>",
            showlegend=False,
        )
    )
    for limit in (expectation["low"], expectation["high"]):
        if limit is not None:
            figure.add_vline(x=limit, line={"color": THRESHOLD, "dash": "dash", "width": 2})
    if expectation["effect"] == "ratio":
        figure.add_vline(x=1, line={"color": NEUTRAL, "width": 1})
    axis = {} if expectation["effect"] == "slope" else _axis([[e["value"] for _, e in rows]])
    figure.update_xaxes(title=title, **axis)
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _sized(figure, 150 + 34 * len(rows))


def curve_figure(record: Record) -> go.Figure | None:
    """Show the median curve of each contender over the seeds, and the band of 80 % of them."""
    figure = go.Figure()
    for color, contender in _colored(record):
        curve = contender["curve"]
        if curve is None:
            continue
        name = contender["name"]
        figure.add_scatter(
            x=[*curve["x"], *reversed(curve["x"])],
            y=[*curve["high"], *reversed(curve["low"])],
            fill="toself",
            fillcolor=color,
            opacity=0.18,
            line={"width": 0},
            hoverinfo="skip",
            legendgroup=name,
            showlegend=False,
        )
        figure.add_scatter(
            x=curve["x"],
            y=curve["median"],
            name=name,
            legendgroup=name,
            line={"color": color, "width": 3 if contender["role"] == "method" else 2},
            hovertemplate="%{y:.4g}",
        )
    if not figure.data:
        return None
    x_title, y_title = record["metric"]["curve"] or ("x", _metric(record))
    drawn = [c["curve"] for c in record["contenders"] if c["curve"] is not None]
    figure.update_xaxes(title=x_title, **_axis([curve["x"] for curve in drawn]))
    figure.update_yaxes(title=y_title, **_axis([curve["median"] for curve in drawn]))
    figure.update_layout(hovermode="x unified")
    return _sized(figure, 440)


def sweep_figure(record: Record) -> go.Figure | None:
    """Show each contender's average over the swept parameter."""
    if not record["sweep"]:
        return None
    ((name, points),) = record["sweep"].items()
    figure = go.Figure()
    for color, contender in _colored(record):
        figure.add_scatter(
            x=points,
            y=contender["swept_averages"],
            name=contender["name"],
            mode="lines+markers",
            line={"color": color, "width": 2},
        )
    averages = [contender["swept_averages"] for contender in record["contenders"]]
    figure.update_xaxes(title=name, **_axis([points]))
    figure.update_yaxes(title=_metric(record), **_axis(averages))
    return _sized(figure, 420)


def seed_figure(record: Record) -> go.Figure:
    """Show every seed's value, joined across contenders where they are paired."""
    names = [contender["name"] for contender in record["contenders"]]
    columns = [[_mean(row) for row in contender["values"]] for contender in record["contenders"]]
    figure = go.Figure()
    for paired in zip(*columns, strict=True):
        figure.add_scatter(
            x=names,
            y=paired,
            mode="lines",
            line={"color": "rgba(134,144,154,0.45)", "width": 1},
            hoverinfo="skip",
            showlegend=False,
        )
    for (color, contender), values in zip(_colored(record), columns, strict=True):
        figure.add_scatter(
            x=[contender["name"]] * len(values),
            y=values,
            mode="markers",
            marker={"color": color, "size": 7},
            hovertemplate="%{y:.4g}<extra></extra>",
            showlegend=False,
        )
    figure.update_yaxes(title=_metric(record), **_axis(columns))
    figure.update_xaxes(automargin=True)
    return _sized(figure, 420)


def tuning_figure(record: Record) -> go.Figure | None:
    """Show the average of every setting of the contenders whose grid is one number long."""
    figure = go.Figure()
    drawn = []
    for color, contender in _colored(record):
        settings = contender["tuning"]["settings"]
        names = {name for setting in settings for name in setting}
        if len(settings) < 2 or len(names) != 1:
            continue
        (name,) = names
        if not all(isinstance(setting[name], (int, float)) for setting in settings):
            continue
        averages = contender["tuning"]["averages"]
        best = contender["tuning"]["best"]
        drawn.append(averages)
        figure.add_scatter(
            x=[setting[name] for setting in settings],
            y=averages,
            name=f"{contender['name']}: {name}",
            mode="lines+markers",
            line={"color": color, "width": 2},
            marker={"size": [13 if i == best else 7 for i in range(len(settings))]},
        )
    if not drawn:
        return None
    figure.update_xaxes(title="setting", type="log")
    figure.update_yaxes(title=_metric(record), **_axis(drawn))
    return _sized(figure, 400)


def _colored(record: Record) -> list[tuple[str, Mapping[str, Any]]]:
    return [(PALETTE[i % len(PALETTE)], c) for i, c in enumerate(record["contenders"])]


def _metric(record: Record) -> str:
    metric = record["metric"]
    return f"{metric['name']} [{metric['unit']}]" if metric["unit"] else str(metric["name"])


def _axis(columns: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return a logarithmic axis for positive values that span more than a factor of 30."""
    values = [v for column in columns for v in column if v is not None]
    wide = bool(values) and min(values) > 0 and max(values) > 30 * min(values)
    return {"type": "log", "exponentformat": "power"} if wide else {"type": "linear"}


def _mean(row: Sequence[float | None]) -> float | None:
    known = [value for value in row if value is not None]
    return sum(known) / len(known) if len(known) == len(row) else None


def _gap(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else high - low


def _sized(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 60, "r": 16, "t": 16, "b": 52},
        legend={"orientation": "h", "y": -0.22, "yanchor": "top"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure
