"""The panel as a person uses it: read the diagnosis, look at a diff, retry, interrupt, undo."""

from __future__ import annotations

import pytest
from pages import Page
from playwright.sync_api import expect

SETUP = """\
import torch
from torch import nn
%load_ext oomdoctor
%oomdoctor simulate 32MiB
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())], nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
criterion = nn.CrossEntropyLoss()
inputs, targets = torch.randn(4096, 256), torch.randint(0, 10, (4096,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=4096)"""
TRAIN = """\
for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
print("steps", 1 + 1)"""


@pytest.mark.parametrize("interface", ["lab", "notebook"])
def test_a_cell_is_healed_by_its_button(open_notebook, interface):
    page: Page = open_notebook(f"heal-{interface}", SETUP, TRAIN, "print('the next cell')", interface=interface)
    page.run_all()
    page.expect_says(1, "OutOfMemoryError")
    retry = page.cell(1).get_by_role("button", name="Retry best", exact=True)
    expect(retry).to_be_visible()
    expect(page.output(2)).not_to_contain_text("the next cell")
    page.press(1, "Show diff 1")
    expect(page.cell(1).locator("pre", has_text="+++").first).to_be_visible()
    page.shot(f"diagnosis-{interface}")
    retry.click()
    page.expect_says(1, "steps 2", timeout_s=60)
    page.shot(f"healed-{interface}")
