"""What terminals, loggers, notebooks and people do to a message on its way into a text."""

from __future__ import annotations

import json

PREFIXES = (
    "[rank0]: ", "[rank12]:", "[default0]:", "[1,0]<stderr>:", "[0] ", "0: ", "- ", "> ", "# ", "E   ", "| ", "│ ",
    "  ", "\x1b[31m", "ERROR:root:", "stderr: ", "[train] ", "node17: ", "trainer-1  | ", "worker-3 | ERROR | ",
    "(EngineCore_DP0 pid=123) ", "(worker pid=77, ip=10.0.0.1) ", "03:04:05.678 ", "2026/01/02 03:04:05 ",
    "2026-01-02T03:04:05.123Z ", "2026-01-02 03:04:05,678 - root - ERROR - ", "[2026-01-02 03:04:05,123][ERROR] ",
    "[2026-01-02 03:04:05] [app] [error] ", "ERROR 01-02 03:04:05 [core.py:77] ",
    "Jan  2 03:04:05 host python[123]: ", "I0102 03:04:05.678901 1234 main.cc:55] ", "<6>[ 123.456789] ",
)  # fmt: skip
WIDTHS = (20, 27, 33, 40, 47, 60, 72, 79, 80, 100, 120)
_COLOURS = 8


def wrapped(text, width, lead="", tail=""):
    """Break each line at ``width`` characters, in the middle of words."""
    pieces = (line[at : at + width] for line in text.split("\n") for at in range(0, max(1, len(line)), width))
    return "\n".join(f"{lead}{piece}{tail}" for piece in pieces)


def boxed(text, side):
    pieces = wrapped(text, 70).split("\n")
    return "\n".join(f"{side} {piece:<70} {side}" for piece in pieces)


def coloured(text, escape):
    words = text.split(" ")
    return " ".join(f"{escape}[1;3{at % _COLOURS}m{word}{escape}[0m" for at, word in enumerate(words))


def mutants(text):
    """Yield a name and a text for each way in which ``text`` may be found."""
    for prefix in PREFIXES:
        yield f"prefix {prefix!r}", "\n".join(prefix + line for line in text.split("\n"))
        yield f"wrapped behind {prefix!r}", wrapped(text, 60, prefix)
    for width in WIDTHS:
        yield f"wrapped at {width}", wrapped(text, width)
    yield "box", boxed(text, "│")
    yield "box of ASCII", boxed(text, "|")
    yield "colours", coloured(text, "\x1b")
    yield "colours without their escape", coloured(text, "")
    yield "twice", f"{text}\n\n{text}"
    yield "CRLF", text.replace("\n", "\r\n")
    yield "carriage return", f"progress 10%\r{text}"
    yield "progress bar", f" 37%|███▋      | 11/30 [00:01<00:03,  5.5it/s]{text}"
    yield "of no width", text.replace(" ", " \u200b").replace("memory", "mem\u200bory")
    yield "no-break spaces", text.replace(" ", "\xa0")
    yield "curly quotes", text.translate({39: 8217, 34: 8221, 96: 8216})
    yield "guillemets", f"«{text}»"
    yield "quoted", f'"{text}"'
    yield "repr", repr(text)
    yield "JSON", json.dumps({"level": "error", "msg": text})
    yield "JSON lines", "\n".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) for line in text.split("\n"))
    yield "HTML", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")
    yield "HTML lines", text.replace("\n", "<br>\n")
    yield "Markdown fence", f"```\n{text}\n```"
    yield "Markdown bold", f"**{text}**"
    yield "upper case", text.upper()
    yield "chain", f"{text}\n\nThe above exception was the direct cause of the following:\n\nRuntimeError: it failed\n"
    yield "worker", f"RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback:\n{text}"
    yield (
        "group",
        "  | ExceptionGroup: many\n  +-+---- 1 ----\n" + "\n".join(f"    | {line}" for line in text.split("\n")),
    )
    yield "long log", "step 1 loss 0.5\n" * 3000 + text + "\n" + "step 2 loss 0.4\n" * 3000
