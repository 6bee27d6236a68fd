"""What the eye sees of a part of a page, computed from its rendered styles: contrast of texts, and what sticks out."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator

# A pixel of the text, and one beside it, are composed from the text outwards to the page, group opacity included.
# Where the background is hatched, each colour of the hatching is tried. Disabled controls are exempt, as in WCAG.
_CONTRASTS = """root => {
  const rgba = text => {
    const n = (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
    const whole = text.startsWith('color(') ? 255 : 1;  // color(srgb 0.2 0.4 0.6 / 0.5)
    return [n[0] * whole, n[1] * whole, n[2] * whole, n.length > 3 ? n[3] : 1];
  };
  const over = (top, under) => {
    const alpha = top[3] + under[3] * (1 - top[3]);
    const mix = i => alpha ? (top[i] * top[3] + under[i] * under[3] * (1 - top[3])) / alpha : 0;
    return [mix(0), mix(1), mix(2), alpha];
  };
  const luminance = colour => {
    const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(colour[0]) + 0.7152 * linear(colour[1]) + 0.0722 * linear(colour[2]);
  };
  const contrast = (a, b) => {
    const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const composed = (pixel, element) => {
    let pixels = [pixel];
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      const hatches = (style.backgroundImage.match(/rgba?\\([^)]*\\)/g) || ['rgba(0,0,0,0)']).map(rgba);
      const fills = hatches.map(hatch => over(hatch, rgba(style.backgroundColor)));
      pixels = pixels.flatMap(one => fills.map(fill => over(one, fill)));
      pixels = pixels.map(one => [one[0], one[1], one[2], one[3] * Number(style.opacity)]);
      const seen = new Set();
      pixels = pixels.filter(one => { const key = one.join(); return !seen.has(key) && seen.add(key); });
    }
    return pixels.map(one => over(one, [255, 255, 255, 1]));
  };
  const found = [];
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    const shown = element.checkVisibility({opacityProperty: true, visibilityProperty: true});
    if (!text || !shown || !element.getClientRects().length || element.closest(':disabled')) continue;
    const texts = composed(rgba(getComputedStyle(element).color), element);
    const grounds = composed([0, 0, 0, 0], element);
    const ratio = Math.min(...texts.map((one, i) => contrast(one, grounds[Math.min(i, grounds.length - 1)])));
    found.push([text.slice(0, 60), Math.round(ratio * 100) / 100]);
  }
  return found;
}"""

# Each element within the frame's width, unless something between the two scrolls it or cuts it off on purpose.
_STICKING_OUT = """root => {
  const frame = root.getBoundingClientRect(), found = [];
  for (const element of root.querySelectorAll('*')) {
    const box = element.getBoundingClientRect();
    const within = box.right <= frame.right + 1 && box.left >= frame.left - 1;
    if (within || !box.width || !element.checkVisibility()) continue;
    let holder = element.parentElement;
    while (holder !== root && getComputedStyle(holder).overflowX === 'visible') holder = holder.parentElement;
    if (holder === root) found.push(`${element.tagName} ${element.textContent.trim().slice(0, 40)}`);
  }
  return found;
}"""

# Text that is cut off by design ends in dots.
_SCROLLED = """root => [...root.querySelectorAll('*')].filter(element => {
  const style = getComputedStyle(element);
  const is_cut = style.overflowX !== 'visible' && style.textOverflow !== 'ellipsis';
  return is_cut && element.checkVisibility() && element.scrollWidth > element.clientWidth + 1;
}).map(element => `${element.tagName} ${element.textContent.trim().slice(0, 40)}`)"""


def contrasts(part: Locator) -> list[tuple[str, float]]:
    """Return each text that is shown in ``part`` with its contrast to what is behind it, as WCAG reckons it."""
    found: list[Any] = part.evaluate(_CONTRASTS)
    return [(text, ratio) for text, ratio in found]


def sticking_out(part: Locator) -> list[str]:
    """Return what of ``part`` is beyond its left or right edge and not in a box that scrolls."""
    found: list[str] = part.evaluate(_STICKING_OUT)
    return found


def scrolled(part: Locator) -> list[str]:
    """Return what of ``part`` is wider than there is room for, so that the rest of it is scrolled to."""
    found: list[str] = part.evaluate(_SCROLLED)
    return found
