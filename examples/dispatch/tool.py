"""The business system behind the agent: a deterministic stand-in that finds zero to nine things for a request."""

import hashlib
from dataclasses import dataclass
from typing import Any

from examples.dispatch.prompts import UNKNOWN_TOOL

MOST_FOUND = 9


@dataclass(frozen=True, slots=True)
class Noun:
    """What a tool finds, as a reply may call it."""

    singular: str
    plural: str


# One word of its own for each tool, so that a reply that names the wrong thing can be told from a right one.
NOUNS = {
    "Movies_3_FindMovies": Noun("movie", "movies"),
    "Events_3_FindEvents": Noun("event", "events"),
    "Music_3_LookupMusic": Noun("song", "songs"),
    "Weather_1_GetWeather": Noun("forecast", "forecasts"),
    "Movies_1_FindMovies": Noun("screening", "screenings"),
    "get_service_providers": Noun("provider", "providers"),
    "Services_1_FindProvider": Noun("stylist", "stylists"),
    "Media_3_FindMovies": Noun("stream", "streams"),
    "Travel_1_FindAttractions": Noun("attraction", "attractions"),
    "cmd_controller.execute": Noun("command", "commands"),
    "Homes_2_FindHomeByArea": Noun("home", "homes"),
    "Services_4_FindProvider": Noun("therapist", "therapists"),
    UNKNOWN_TOOL: Noun("result", "results"),
}


def run_tool(name: str | None, query: str) -> dict[str, Any]:
    """Run a tool on a query: `{"tool", "found"}`, `found` from 0 to 9. A name that is no tool finds 0 as `unknown`."""
    if name is None or name == UNKNOWN_TOOL or name not in NOUNS:
        return {"tool": UNKNOWN_TOOL, "found": 0}
    digest = hashlib.sha256(f"{name}\n{query}".encode()).digest()
    return {"tool": name, "found": int.from_bytes(digest[:4], "big") % (MOST_FOUND + 1)}


def results() -> list[dict[str, Any]]:
    """Every result that `run_tool` can give."""
    found = [{"tool": tool, "found": n} for tool in NOUNS if tool != UNKNOWN_TOOL for n in range(MOST_FOUND + 1)]
    return [*found, run_tool(None, "")]
