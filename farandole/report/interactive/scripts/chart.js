/* The curves of all lanes for one metric. */

const NEAR_PIXELS = 60;
const DASHES = { "-": "", "--": "7 4", ":": "2 3", "-.": "8 3 2 3" };

class Chart extends Plot {
  /* `panel`: key, title and kind of what is drawn. `page` knows lanes, hidden ones and the axis. */
  constructor(host, panel, page) {
    super(host, panel.title, 300);
    this.panel = panel;
    this.page = page;
    this.log = page.logBox.checked;
  }

  series() {
    const key = this.page.axis;
    return this.page.data.lanes
      .filter((lane) => !this.page.hidden.has(lane.name))
      .map((lane) => ({ lane, points: this.points(lane, key) }))
      .filter((line) => line.points.some(([, y]) => y !== null));
  }

  points(lane, key) {
    const { kind } = this.panel;
    const source = kind === "note" ? lane.notes : lane.logs;
    const across = source.across[key];
    const values = source[kind];
    if (!across || !Object.hasOwn(values, this.panel.key)) return [];
    const up = values[this.panel.key];
    const found = [];
    for (let at = 0; at < across.length; at += 1) {
      if (across[at] !== null) found.push([across[at], up[at]]);
    }
    if (this.panel.kind === "note" && found.length) {
      const end = lane.last[key];
      if (end !== null && end !== undefined && end > found[found.length - 1][0]) {
        found.push([end, found[found.length - 1][1]]);
      }
    }
    return found;
  }

  target() {
    const target = this.page.data.target;
    return target && this.panel.kind === "metric" && target.metric === this.panel.key ? target : null;
  }

  extent(from = -Infinity, to = Infinity) {
    const lines = this.series().map((line) => line.points).flat()
      .filter(([x, y]) => y !== null && x >= from && x <= to);
    const target = this.target();
    const heights = lines.map(([, y]) => y).concat(target ? [target.value] : []);
    const positive = heights.filter((y) => y > 0);
    const log = this.log && positive.length > 0;
    const used = log ? positive : heights;
    let low = least(used, 0), high = most(used, 1);
    if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
    const edge = log ? Math.pow(high / low, 0.04) : (high - low) * 0.05;
    const x1 = most(lines.map(([x]) => x), 1) || 1;
    return { x0: 0, x1, y0: log ? low / edge : low - edge, y1: log ? high * edge : high + edge, log };
  }

  xTicks(low, high, count) {
    return (this.page.axis === "time" ? timeTicks : linearTicks)(low, high, count);
  }
  xText(value) { return FORMATS[this.page.axis](value); }
  xName() { return this.page.data.axes.find((axis) => axis.key === this.page.axis).name; }
  yText(value) { return FORMATS[this.panel.format](value); }

  marks(layer, scale) {
    const target = this.target();
    if (target) {
      const y = scale.y(target.value);
      const { left } = this.margin;
      element("line", { x1: left, x2: left + scale.width, y1: y, y2: y, class: "target" }, layer);
      const label = element("text", { x: left + 5, y: y - 5, class: "tick" }, layer);
      label.textContent = target.text;
    }
    for (const { lane, points } of this.series()) {
      const style = `stroke: var(--${lane.colour}); fill: none`;
      const path = { d: this.path(points, scale), style, class: "lane", "stroke-dasharray": DASHES[lane.dash] };
      element("path", path, layer).dataset.lane = lane.name;
      const drawn = points.filter(([, y]) => this.isDrawn(y, scale));
      if (drawn.length === 1) this.dot(layer, scale, lane, drawn[0]);
      if (lane.outcome === "failed" && drawn.length) this.cross(layer, scale, drawn[drawn.length - 1]);
      if (target && lane.reached) this.star(layer, scale, lane);
    }
  }

  isDrawn(y, scale) { return y !== null && (!scale.log || y > 0); }

  path(points, scale) {
    let text = "", pen = false, before = 0;
    for (const [x, y] of points) {
      if (!this.isDrawn(y, scale)) { pen = false; continue; }
      const px = scale.x(x).toFixed(1), py = scale.y(y).toFixed(1);
      if (pen && this.panel.kind === "note") text += `L${px} ${before}`;
      text += `${pen ? "L" : "M"}${px} ${py}`;
      pen = true;
      before = py;
    }
    return text;
  }

  dot(layer, scale, lane, [x, y]) {
    element("circle", { cx: scale.x(x), cy: scale.y(y), r: 3.5, style: `fill: var(--${lane.colour})` }, layer);
  }

  cross(layer, scale, [x, y]) {
    const px = scale.x(x), py = scale.y(y);
    const d = `M${px - 6} ${py - 6}l12 12m0 -12l-12 12`;
    element("path", { d, class: "cross" }, layer);
  }

  star(layer, scale, lane) {
    const x = lane.reached[this.page.axis];
    if (x === null || x === undefined) return;
    const corners = Array.from({ length: 10 }, (_, at) => {
      const radius = at % 2 ? 3.4 : 8, angle = (Math.PI * at) / 5 - Math.PI / 2;
      return `${scale.x(x) + radius * Math.cos(angle)},${scale.y(lane.reached.value) + radius * Math.sin(angle)}`;
    });
    element("polygon", { points: corners.join(" "), class: "star", style: `fill: var(--${lane.colour})` }, layer);
  }

  nearest(x, y) {
    let best = null, distance = NEAR_PIXELS;
    for (const { lane, points } of this.series()) {
      for (const [vx, vy] of points) {
        if (!this.isDrawn(vy, this.scale)) continue;
        const px = this.scale.x(vx), py = this.scale.y(vy);
        const away = Math.hypot(px - x, (py - y) / 2);
        if (away < distance && px >= this.margin.left - 1 && px <= this.margin.left + this.scale.width + 1) {
          distance = away;
          best = { x: px, y: py, lines: [lane.name, `${this.panel.title}: ${this.yText(vy)}`, `${this.xName()}: ${this.xText(vx)}`] };
        }
      }
    }
    return best;
  }
}

function least(values, otherwise) { return values.reduce((a, b) => (b < a ? b : a), values.length ? values[0] : otherwise); }
function most(values, otherwise) { return values.reduce((a, b) => (b > a ? b : a), values.length ? values[0] : otherwise); }
