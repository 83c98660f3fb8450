"""The look of the page: one style sheet, inside it, with light and dark by the reader's system."""

from __future__ import annotations

from farandole.report.plots.palette import SHADES

PAGE = """
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 78rem; padding: 2.5rem 1.5rem 4rem;
  background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
h1 { font-size: 1.65rem; line-height: 1.3; font-weight: 650; margin: 0 0 .4rem; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 2.6rem 0 .8rem; }
h3 { font-size: 1rem; font-weight: 600; margin: 1.4rem 0 .4rem; }
p, .note { margin: .4rem 0; max-width: 48rem; }
.note, figcaption, header p { color: var(--muted); font-size: .9rem; }
code { font: .92em ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
h1 code { font-size: .88em; background: var(--panel); border-radius: .3rem; padding: .05em .35em; }
.warning {
  border-left: .25rem solid var(--alarm); background: var(--panel);
  padding: .5rem .9rem; margin: .6rem 0; border-radius: 0 .3rem .3rem 0;
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
.race { width: 100%; }
th, td { padding: .45rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 500; vertical-align: bottom; }
td { white-space: nowrap; }
th.words, td.words { text-align: left; white-space: normal; }
.race td.words:first-child { min-width: 16rem; }
tr.first td { background: var(--panel); font-weight: 600; }
.strategy { display: flex; align-items: baseline; }
.failed { color: var(--alarm); font-weight: 600; }
.swatch {
  display: inline-block; flex: none;
  width: .75em; height: .75em; border-radius: .15em; margin-right: .5em;
}
.pair {
  display: grid; gap: 1.2rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
}
figure { margin: 0; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; }
dl {
  display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.2rem;
  font-size: .9rem; margin: .4rem 0;
}
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
details { margin: .5rem 0; }
summary { cursor: pointer; }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } }
"""


def sheet() -> str:
    light = "".join(f"--{shade.name}: {shade.light}; " for shade in SHADES)
    dark = "".join(f"--{shade.name}: {shade.dark}; " for shade in SHADES)
    return (
        ":root { color-scheme: light dark; --ground: #ffffff; --panel: #f3f4f7; "
        f"--alarm: #b3261e; {light}}}\n"
        "@media (prefers-color-scheme: dark) { :root { --ground: #15171b; --panel: #20242b; "
        f"--alarm: #ff8a80; {dark}}} }}\n"
        # Paper is white, whatever the screen.
        f"@media print {{ :root {{ --ground: #ffffff; --panel: #f3f4f7; {light}}} }}" + PAGE
    )
