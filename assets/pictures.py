"""Pictures and tables as Dagster metadata: people would rather look than read."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dagster as dg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def picture(png: bytes, alt: str) -> dg.MarkdownMetadataValue:
    """A PNG that the UI shows inline."""
    return dg.MetadataValue.md(f"![{alt}](data:image/png;base64,{base64.b64encode(png).decode()})")


def figure(width: float = 6.4, height: float = 3.2) -> "Figure":
    """An empty matplotlib figure without a window system; size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def png_of(figure: "Figure") -> bytes:
    """The figure as PNG bytes at 110 dots per inch."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def learning_curve(records: Sequence[Mapping[str, float | None]], title: str) -> bytes:
    """Mean reward and loss by optimizer step, as a PNG."""
    fig = figure()
    reward_axis = fig.subplots()
    steps = [record["step"] for record in records]
    nan = float("nan")  # a value that was not finite stands as null in the log: a gap in the curve
    rewards = [nan if record["reward"] is None else record["reward"] for record in records]
    losses = [nan if record["loss"] is None else record["loss"] for record in records]
    reward_axis.plot(steps, rewards, marker="o", color="tab:blue", label="reward")
    reward_axis.set(xlabel="optimizer step", ylabel="mean reward of the batch", title=title)
    loss_axis = reward_axis.twinx()
    loss_axis.plot(steps, losses, linestyle="--", color="tab:red", label="loss")
    loss_axis.set_ylabel("loss")
    lines = [*reward_axis.get_lines(), *loss_axis.get_lines()]
    reward_axis.legend(lines, [str(line.get_label()) for line in lines], loc="best")
    return png_of(fig)


def table(rows: Sequence[Mapping[str, object]], *, limit: int = 5, width: int = 160) -> dg.TableMetadataValue:
    """The first rows as a table in the UI; long texts are cut to `width` characters."""
    records = [dg.TableRecord({key: _cell(value, width) for key, value in row.items()}) for row in rows[:limit]]
    names = list(records[0].data) if records else []
    return dg.MetadataValue.table(
        records=records,
        schema=dg.TableSchema(columns=[dg.TableColumn(name, "string") for name in names]),
    )


def _cell(value: object, width: int) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= width else text[: width - 1] + "…"
