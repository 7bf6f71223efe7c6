"""The report in a browser: nothing overflows, every chart is drawn, all text is legible, nothing is fetched.

Skipped if Chromium is not installed (Debian: apt-get install chromium).
"""

import html
import json
import re
import shutil
import subprocess

import pytest

from leeway.launch.report.data import collect
from leeway.launch.report.page import render
from tests.unit.report_run import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT_S = 90

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

MEASURE = """
const luminance = (text) => {
  const parts = text.match(/[\\d.]+/g).map(Number);
  const [r, g, b] = parts.slice(0, 3).map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const isClear = (color) => color === "transparent" || /, 0\\)$/.test(color);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const color = getComputedStyle(each).backgroundColor;
    if (!isClear(color)) return color;
  }
  return "rgb(255, 255, 255)";
};
const ratio = (a, b) => {
  const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const found = { low: [], texts: 0, charts: [], wide: [], values: 0 };
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  if (!own || element.closest("script, style, .skip, noscript") || !element.getClientRects().length) continue;
  const ink = getComputedStyle(element).color, paper = behind(element);
  found.texts += 1;
  if (ratio(ink, paper) < 4.5) found.low.push([element.textContent.slice(0, 40), ink, paper, ratio(ink, paper)]);
}
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const channels = (name) => {
  canvas.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
};
const plots = JSON.parse(document.getElementById("plots").textContent);
const pixelsOf = (image, name) => {
  const target = channels(name);
  let count = 0;
  for (let i = 0; i < image.length; i += 4)
    if (image[i + 3] > 128 && [0, 1, 2].every((c) => Math.abs(image[i + c] - target[c]) < 40)) count += 1;
  return count;
};
for (const place of document.querySelectorAll(".plot")) {
  const drawing = place.querySelector("canvas"), plot = plots[place.dataset.plot];
  const image = drawing.getContext("2d").getImageData(0, 0, drawing.width, drawing.height).data;
  const colors = plot.kind === "lanes" ? ["step", "generate"] : plot.series.map((each) => each.color);
  const counts = colors.map((name) => pixelsOf(image, name));
  found.charts.push([place.getAttribute("aria-label"), counts, pixelsOf(image, "quiet")]);
  place.focus();
  place.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
  const text = place.closest("figure").querySelector("output").textContent;
  const numbers = [...place.closest("figure").querySelectorAll(".legend b")].map((each) => each.textContent).join(" ");
  if (text && !/NaN|undefined/.test(text + numbers)) found.values += 1;
  place.blur();
}
for (const element of document.querySelectorAll("main *, header *, footer *")) {
  if (element.closest(".scroll > *, .plot *")) continue;
  if (element.getBoundingClientRect().right > innerWidth + 0.5) found.wide.push(element.outerHTML.slice(0, 80));
}
found.width = innerWidth;
found.scroll = document.documentElement.scrollWidth;
found.dark = matchMedia("(prefers-color-scheme: dark)").matches;
found.resources = performance.getEntriesByType("resource").map((each) => each.name);
found.title = document.title;
parent.postMessage(JSON.stringify(found), "*");
"""
WIDTHS = (1280, 390)
FRAMES = """<!doctype html><html style="color-scheme: light dark"><pre id="result"></pre>
<iframe src="page.html" style="width: 1280px; height: 900px; border: 0"></iframe>
<iframe src="page.html" style="width: 390px; height: 900px; border: 0"></iframe>
<script>
const all = [];
addEventListener("message", (event) => {
  all.push(event.data);
  if (all.length === 2) document.getElementById("result").textContent = `[${all.join()}]`;
});
</script>
"""
"""Page with two frames that contain the report; a browser window cannot be narrower than 500 px."""


@pytest.fixture(scope="module", params=["whole", "one step", "long", "broken"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / ("b" * 60)  # a long name must wrap
    run = make_run(folder, num_steps={"one step": 1, "long": 20_000, "broken": 3}.get(request.param, 40))
    if request.param == "broken":
        run.status.unlink()
        (run.buffer / "data.mdb").unlink()
    return request.param, render(collect(run))


def measure(page, folder, scheme):
    """Return the measurements of a page at both widths in this colour scheme, and the console messages."""
    (folder / "page.html").write_text(page.replace("</body>", f"<script>{MEASURE}</script></body>"))
    (folder / "frames.html").write_text(FRAMES)
    command = [
        CHROMIUM,
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"),
        *("--window-size=1400,1000", f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"),
        *("--virtual-time-budget=4000", "--dump-dom", f"file://{folder / 'frames.html'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    result = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, flags=re.S)
    assert result is not None, done.stderr
    messages = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return {each["width"]: each for each in json.loads(html.unescape(result.group(1)))}, messages


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_correctly(page, tmp_path, scheme):
    kind, text = page
    seen, messages = measure(text, tmp_path, scheme)
    assert messages == []
    assert sorted(seen, reverse=True) == list(WIDTHS)
    for width, found in seen.items():
        assert found["resources"] == []
        assert found["dark"] == (scheme == "dark")
        assert found["title"].endswith("Leeway"), "a script from the run was executed"
        assert found["wide"] == []
        assert found["scroll"] <= width
        assert found["texts"] > 100
        assert found["low"] == [], "text with low contrast"
        assert len(found["charts"]) >= {"broken": 13}.get(kind, 15)
        for label, num_pixels, num_of_axes in found["charts"]:
            assert label
            assert num_of_axes > 0, f"an axis lacks the colour of the page: {label}"
            if kind == "whole" and not label.startswith("Failed samples"):  # one curve hides another
                assert min(num_pixels) > 0, f"a curve is not drawn: {label}"
            assert sum(num_pixels) > 0, f"nothing is drawn: {label}"
        assert found["values"] == len(found["charts"]), "the arrow keys show values"
