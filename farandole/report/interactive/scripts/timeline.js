/* What each rank does when, from a trace: a row for each rank, and who keeps whom waiting. */

const ROW_PIXELS = 34;
const KINDS = { compute: "lane-0", wait: "lane-1", communication: "lane-2", data: "lane-4", other: "muted" };

class Timeline extends Plot {
  constructor(host, timeline) {
    super(host, "timeline", 60 + ROW_PIXELS * timeline.rows.length);
    this.timeline = timeline;
  }

  extent() { return { x0: this.timeline.begin, x1: this.timeline.end, y0: 0, y1: this.timeline.rows.length, log: false }; }
  isBox() { return false; }
  xTicks(low, high, count) { return linearTicks(low, high, count); }
  xText(value) { return plain(Number(value.toPrecision(6))) + " s"; }
  xName() { return "time of the trace"; }
  yMarks() {
    const count = this.timeline.rows.length;
    return this.timeline.rows.map((row, at) => [count - at - 0.5, `rank ${row.rank}`]);
  }

  marks(layer, scale) {
    const count = this.timeline.rows.length;
    this.timeline.rows.forEach((row, at) => {
      const y = scale.y(count - at) + 4;
      for (const [begin, end, kind] of row.spans) {
        if (end < scale.area.x0 || begin > scale.area.x1) continue;
        const x = scale.x(begin), width = Math.max(0.6, scale.x(end) - x);
        const size = { x, width, y: kind === "wait" ? y + 5 : y, height: ROW_PIXELS - (kind === "wait" ? 18 : 8) };
        element("rect", { ...size, class: `span ${kind}`, style: `fill: var(--${KINDS[kind]})` }, layer);
      }
    });
  }

  nearest(x, y) {
    const count = this.timeline.rows.length;
    const at = Math.floor(count - this.scale.valueY(y));
    const row = this.timeline.rows[at];
    if (!row) return null;
    const when = this.scale.valueX(x);
    const under = row.spans.filter(([begin, end]) => begin <= when && when <= end);
    if (!under.length) return null;
    const [begin, end, kind, name] = under[under.length - 1];
    const lines = [`rank ${row.rank}: ${name}`, `${kind}, ${plain((end - begin) * 1000)} ms`];
    return { x, y: this.scale.y(count - at), plain: true, lines };
  }
}
