"use strict";
// Redraws the answer at the setting of the dials: from the page's own data, or from the server that shows the page.
{
  const data = JSON.parse(document.getElementById("what-if-data").textContent);
  const part = name => document.getElementById(`what-if-${name}`);
  const dials = data.dials.map((_, number) => document.getElementById(`dial-${number}`));
  const REST_MS = 400, LEFT = 110, WIDTH = 1000, ROW = 20, GAP = 3, DIGIT = 6.2;
  let asked = 0, rest, ownStep;

  function svg(name, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function cell(name, text, kind) {
    const element = document.createElement(name);
    element.textContent = text;
    if (kind) element.className = kind;
    return element;
  }

  function drawUses(uses) {
    const most = Math.max(...uses.map(use => use[2]));
    part("uses").replaceChildren(...uses.map(([name, layout, seconds, step, memory], index) => {
      const row = document.createElement("tr"), head = cell("th", name), time = cell("td", step, "number");
      head.scope = "row";
      if (!index) row.className = "chosen";
      const bar = svg("svg", {class: "bar", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true"});
      bar.append(svg("rect", {width: 100 * seconds / most, height: 6}));
      time.append(bar);
      row.append(head, cell("td", layout), time, cell("td", memory, "number"));
      return row;
    }));
  }

  function drawTimeline(ranks, step) {
    const picture = part("timeline"), height = ranks.length * (ROW + GAP);
    const scale = (WIDTH - LEFT) / Math.max(step, ownStep || step), unit = step * scale / data.units;
    picture.setAttribute("viewBox", `0 0 ${WIDTH} ${Math.max(height, 1)}`);
    picture.replaceChildren();
    ranks.forEach(([name, boxes], index) => {
      const row = svg("g", {transform: `translate(0 ${index * (ROW + GAP)})`});
      row.append(svg("text", {x: LEFT - 6, y: 14, class: "end"}, name));
      row.append(svg("rect", {x: LEFT, width: step * scale, height: ROW, class: "ground"}));
      const longest = String(boxes.reduce((most, value, i) => i % 4 === 3 && value > most ? value : most, 0)).length;
      for (let i = 0; i < boxes.length; i += 4) {
        const [begin, end, kind, number] = boxes.slice(i, i + 4), width = (end - begin) * unit, letter = data.kinds[kind];
        const x = LEFT + begin * unit;
        row.append(svg("rect", {x, width: Math.max(0.4, width - Math.min(0.7, width / 4)), height: ROW,
                                class: `${letter}0`}));
        if (number >= 0 && width > longest * DIGIT + 2)
          row.append(svg("text", {x: x + width / 2, y: 14, class: `n on-${letter}0`}, number));
      }
      picture.append(row);
    });
    if (ownStep && ranks.length)
      picture.append(svg("path", {class: "rule", d: `M${LEFT + ownStep * scale} 0V${height}`}));
  }

  function draw(answer) {
    if (!answer.uses.length) {
      part("answer").textContent = `Nothing fits: ${answer.obstacle}.`;
      part("uses").replaceChildren();
      drawTimeline([], 1);
      return;
    }
    const [name, , seconds, step] = answer.uses[0];
    const change = ownStep ? 100 * (seconds / ownStep - 1) : 0;
    const beside = Math.abs(change) < 0.05 ? "" : `, ${change > 0 ? "+" : ""}${change.toFixed(1)} % beside the job's own`;
    const joint = name.includes(" > ") ? "Pipeline over " : name.includes(" + ") ? "Replicas at " : "Only ";
    part("answer").textContent = `${joint}${name}: ${step} a step${beside}.`;
    drawUses(answer.uses);
    drawTimeline(answer.ranks, seconds);
  }

  async function ask(at, isSearched) {
    const mine = ++asked;
    try {
      const reply = await fetch(`/answer?at=${at.join(",")}&search=${isSearched ? 1 : 0}`);
      const answer = await reply.json();
      if (mine !== asked) return;
      if (ownStep === undefined && answer.uses.length) ownStep = answer.uses[0][2];
      draw(answer);
      if (!isSearched) part("answer").append(" Searching for the plan when the dials rest.");
    } catch {
      if (mine === asked) part("answer").textContent = "No answer: `farpipe explore` has ended.";
    }
  }

  function turned() {
    const at = dials.map(dial => Number(dial.value));
    dials.forEach((dial, number) => {
      const text = data.dials[number].texts[at[number]];
      document.getElementById(`dial-${number}-text`).textContent = text;
      dial.setAttribute("aria-valuetext", text);
    });
    if (data.cells) {
      draw(data.cells[at.reduce((place, index, number) => place * data.dials[number].texts.length + index, 0)]);
      return;
    }
    ask(at, false);
    clearTimeout(rest);
    rest = setTimeout(() => ask(at, true), REST_MS);
  }

  if (data.cells) {
    const own = data.dials.reduce((place, dial) => place * dial.texts.length + dial.at, 0);
    if (data.cells[own].uses.length) ownStep = data.cells[own].uses[0][2];
  }
  dials.forEach(dial => dial.addEventListener("input", turned));
  turned();
}
