// What is wrong with how a page looks, as sentences; a test runs this in the page.
(() => {
  const found = [];
  const shown = (one) => one.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const named = (one) => `${one.tagName.toLowerCase()}${one.id ? `#${one.id}` : ""}: ${one.textContent.trim().slice(0, 50)}`;
  const within = (inner, outer) => inner.left >= outer.left - 1 && inner.right <= outer.right + 1;

  if (document.documentElement.scrollWidth > innerWidth) {
    const far = [...document.querySelectorAll("body *")].filter((one) => shown(one) && !one.closest(".scroll, pre") && one.getBoundingClientRect().right > innerWidth + 1);
    found.push(`the page is ${document.documentElement.scrollWidth} px wide: ${named(far.at(-1) ?? document.body)}`);
  }

  // Headers, cards and controls: nothing is cut off, and nothing lies over its neighbour.
  for (const group of document.querySelectorAll("header, .cards, .verdict, #controls, #legend")) {
    const parts = [...group.children].filter(shown);
    const boxes = parts.map((one) => one.getBoundingClientRect());
    parts.forEach((one, i) => {
      if (one.scrollWidth > one.clientWidth + 1 && one.clientWidth && getComputedStyle(one).overflowX !== "auto" && !one.matches("pre, select, input")) found.push(`cut off: ${named(one)}`);
      if (!within(boxes[i], group.getBoundingClientRect())) found.push(`sticks out: ${named(one)}`);
      boxes.slice(i + 1).forEach((other, k) => {
        const over = Math.min(boxes[i].right, other.right) - Math.max(boxes[i].left, other.left) > 1 && Math.min(boxes[i].bottom, other.bottom) - Math.max(boxes[i].top, other.top) > 1;
        if (over) found.push(`overlap: ${named(one)} and ${named(parts[i + 1 + k])}`);
      });
    });
  }

  // Text stays in its box, and numbers on one line. Where a box scrolls, what lies in it may be wider than what is around.
  const rangeOf = (node, from, to) => {
    const range = document.createRange();
    range.setStart(node, from);
    range.setEnd(node, to);
    return [...range.getClientRects()].filter((box) => box.width > 0);
  };
  const LONE_NUMBER = /(?<![\w./:=-])[-+−±≥$]*\d[\d,]*(\.\d+)?(?![\w/:=-]|\.\w)[%×]?/g;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    const one = node.parentElement;
    if (!node.textContent.trim() || one.closest("script, style, option, svg") || !shown(one)) continue;
    for (const { 0: text, index } of node.textContent.matchAll(LONE_NUMBER)) {
      const tops = rangeOf(node, index, index + text.length).map((box) => box.top);
      if (tops.some((top) => Math.abs(top - tops[0]) > 4)) found.push(`broken number ${text}: ${named(one)}`);
    }
    for (let box = one; box && box !== document.body && !box.matches(".scroll, pre"); box = box.parentElement) {
      if (!box.matches("td, th, section, aside, .card, header, main, button, figure, fieldset")) continue;
      if (rangeOf(node, 0, node.length).some((line) => !within(line, box.getBoundingClientRect()))) found.push(`outside ${box.tagName.toLowerCase()}: ${named(one)}`);
    }
  }

  // Of a figure no text is cut off at its edge, and its title, legend and axes' titles do not lie over each other.
  for (const plot of document.querySelectorAll("div.plot .main-svg:first-of-type")) {
    const edge = plot.getBoundingClientRect();
    if (!edge.width) continue;
    const parts = [...plot.parentElement.querySelectorAll(".gtitle, .legendtext, .xtitle, .ytitle, .xtick, .ytick, .annotation-text")].filter((one) => one.textContent.trim() && one.getBoundingClientRect().width);
    const boxes = parts.map((one) => one.getBoundingClientRect());
    parts.forEach((one, i) => {
      if (!within(boxes[i], edge) || boxes[i].top < edge.top - 2 || boxes[i].bottom > edge.bottom + 2) found.push(`cut off in a figure: ${named(one)}`);
      const { t: above, h: high } = plot.parentElement.closest("div.plot")._fullLayout._size;
      if (one.matches(".legendtext") && boxes[i].bottom > edge.top + above + 2 && boxes[i].top < edge.top + above + high) found.push(`a legend over its figure: ${named(one)}`);
      if (!one.matches(".gtitle, .xtitle, .ytitle, .legendtext")) return;
      parts.forEach((other, k) => {
        const over = Math.min(boxes[i].right, boxes[k].right) - Math.max(boxes[i].left, boxes[k].left) > 2 && Math.min(boxes[i].bottom, boxes[k].bottom) - Math.max(boxes[i].top, boxes[k].top) > 3;
        if (k !== i && over) found.push(`overlap in a figure: ${named(one)} and ${named(other)}`);
      });
    });
  }

  // Contrast of text (WCAG 2, 1.4.3), but of what cannot be used now.
  const channels = (text) => text.match(/[\d.]+/g).map(Number);
  const luminance = ([red, green, blue]) => [red, green, blue].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4)).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
  const ground = (one) => {
    if (!one) return [255, 255, 255];
    const colour = channels(getComputedStyle(one).backgroundColor);
    return colour[3] === 0 ? ground(one.parentElement) : colour[3] === undefined ? colour : over(colour, ground(one.parentElement));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || seen.has(one) || one.closest("script, style, :disabled, option") || !shown(one)) continue;
    seen.add(one);
    const css = getComputedStyle(one);
    const colour = channels(one instanceof SVGElement ? css.fill : css.color);
    const [light, dark] = [over(colour, ground(one)), ground(one)].map(luminance).sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${named(one)}`);
  }
  return [...new Set(found)];
})()
