"use strict";
/* Numbers as people read them, and where the marks of an axis stand. */

const NONE = "–";

function prefixed(value, unit) {
  const size = Math.abs(value);
  for (const [factor, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= factor) return plain(value / factor) + " " + prefix + unit;
  }
  return plain(value) + (unit ? " " + unit : "");
}

function plain(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (value < 120) return plain(value) + " s";
  if (value < 7200) return plain(value / 60) + " min";
  return plain(value / 3600) + " h";
}

function bytes(value) { return prefixed(value, "B"); }

const FORMATS = {
  time: seconds,
  samples: (value) => prefixed(value, ""),
  bytes: bytes,
  energy: (value) => prefixed(value, "J"),
  money: plain,
  number: plain,
};

/* About `count` marks at 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, count) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, count);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) {
    ticks.push(Number((at * step).toPrecision(12)));
  }
  return ticks;
}

/* Time in steps that divide minutes and hours. */
function timeTicks(low, high, count) {
  const unit = high >= 7200 ? 3600 : high >= 120 ? 60 : 1;
  return linearTicks(low / unit, high / unit, count).map((tick) => tick * unit);
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  if (last - first > 2) {
    const every = Math.max(1, Math.ceil((last - first) / count));
    const ticks = [];
    for (let at = first; at <= last; at += every) ticks.push(Math.pow(10, at));
    return ticks.filter((tick) => tick >= low && tick <= high);
  }
  const ticks = [];
  for (let at = first; at <= last; at += 1) {
    for (const factor of [1, 2, 5]) ticks.push(factor * Math.pow(10, at));
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 1 ? inside : linearTicks(low, high, count);
}
