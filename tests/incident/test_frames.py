from __future__ import annotations

import pytest

from oomdoctor.incident import from_text
from oomdoctor.model.incident import CellLine

OOM = "RuntimeError: CUDA out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity)"
PYTHON = f"""\
Traceback (most recent call last):
  File "/home/u/train.py", line 77, in <module>
    main()
  File "/home/u/train.py", line 50, in main
    loss = model(batch).loss
           ^^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1553, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
  File "/venv/lib/python3.11/site-packages/models/llama.py", line 345, in forward
    weights = torch.matmul(query, key.transpose(2, 3))
              ~~~~~~~^^^^^^
{OOM}"""
IPYTHON = f"""\
RuntimeError                              Traceback (most recent call last)
Cell In[7], line 3
      1 model.train()
----> 3 y = step(x)

Cell In[5], line 2, in step(x)
      1 def step(x):
----> 2     return net(x)

File ~/proj/net.py:12, in Net.forward(self, x)
     11 def forward(self, x):
---> 12     return self.attention(x)

File /venv/lib/python3.11/site-packages/torch/nn/modules/linear.py:125, in Linear.forward(self, input)
--> 125     return F.linear(input, self.weight, self.bias)

{OOM}"""
OLD_IPYTHON = f"""\
RuntimeError                              Traceback (most recent call last)
<ipython-input-12-aabbcc> in <module>()
      1 for x in data:
----> 2     out = model(x)

/usr/lib/python3.6/dist-packages/torch/nn/modules/module.py in __call__(self, *input, **kwargs)
--> 491             result = self.forward(*input, **kwargs)

<ipython-input-10-ee> in forward(self, x)
     10
---> 11         return self.conv(x)

{OOM}"""
RICH = f"""\
╭──────── Traceback (most recent call last) ────────╮
│ /home/u/train_network.py:864 in <module>           │
│                                                    │
│   861 │   args = parser.parse_args()               │
│ ❱ 864 │   train(args)                              │
│                                                    │
│ /home/u/train_network.py:200 in train              │
│ ❱ 200 │   │   noise = unet(latents, t)             │
╰────────────────────────────────────────────────────╯
{OOM}"""


def line(number, at, source, function="<module>"):
    return CellLine(number=number, line=at, source_line=source, function=function)


def lines_of(text):
    incident = from_text(text)[0]
    return incident.cell, incident.inner


@pytest.mark.parametrize(
    ("text", "outer", "inner"),
    [
        (
            PYTHON,
            line(None, 77, "main()"),
            line(None, 345, "weights = torch.matmul(query, key.transpose(2, 3))", "forward"),
        ),
        (IPYTHON, line(7, 3, "y = step(x)"), line(None, 12, "return self.attention(x)", "Net.forward")),
        (OLD_IPYTHON, line(12, 2, "out = model(x)"), line(10, 11, "return self.conv(x)", "forward")),
        (RICH, line(None, 864, "train(args)"), line(None, 200, "noise = unet(latents, t)", "train")),
        ("\n".join(f"[rank3]: {one}" for one in PYTHON.split("\n")), line(None, 77, "main()"), None),
        (f"{PYTHON}\n\nlater\n\n{IPYTHON}", line(None, 77, "main()"), None),
    ],
    ids=["python", "ipython", "old ipython", "rich", "rank", "the first of two"],
)
def test_the_lines_that_were_running_are_read_out_of_a_traceback(text, outer, inner):
    read = lines_of(text)
    assert read[0] == outer
    assert inner is None or read[1] == inner


def test_the_last_traceback_above_a_message_is_the_one_it_belongs_to():
    second = PYTHON.replace("600.00 MiB", "700.00 MiB").replace("line 77", "line 99")
    first, other = from_text(f"{PYTHON}\n\nDuring handling of the above exception:\n\n{second}")
    assert first.cell is not None
    assert other.cell is not None
    assert (first.cell.line, other.cell.line) == (77, 99)


@pytest.mark.parametrize(
    ("above", "source"),
    [
        ("scores = q @ k.transpose(-1, -2)", "scores = q @ k.transpose(-1, -2)"),
        ("    return F.softmax(scores, dim=-1)\n           ^^^^^^^^^", "return F.softmax(scores, dim=-1)"),
        ("mx.eval([c.state for c in cache])", "mx.eval([c.state for c in cache])"),
        ("loss = 0.5 (avg 0.4)", None),
        ("step 3: loss = f(x)", None),
        ("ValueError: bad(x)", None),
        ("We ran it for the batch-size 4.", None),
        ("100%|####| 3/3 [00:01<00:00, 3.0it/s]", None),
    ],
)
def test_without_a_traceback_the_line_of_code_above_the_message_is_the_one(above, source):
    expected = None if source is None else CellLine(number=None, line=None, source_line=source)
    assert lines_of(f"{above}\n{OOM}") == (expected, None)


def test_a_file_of_a_library_is_not_the_line_of_the_user_where_there_is_one():
    outer, _ = lines_of(PYTHON.replace("/home/u/train.py", "/venv/lib/python3.11/site-packages/tool/cli.py"))
    assert outer is not None
    assert outer.line == 345
