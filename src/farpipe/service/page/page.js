"use strict";
// The stream says when something has changed; then the page is fetched again, and of its live parts those that differ
// are put in place: what is open, focused or scrolled stays so.
const live = document.getElementById("live");
const served = new Map([...document.querySelectorAll("[data-live]")].map(part => [part.id, part.innerHTML]));
let fetching = false, again = false;

function kept(part) {
  const open = [...part.querySelectorAll("details[open]")].map(one => one.id);
  const moved = [...part.querySelectorAll(".scroll")].map(one => [one.ariaLabel, one.scrollLeft, one.scrollTop]);
  const focus = part.contains(document.activeElement) ? document.activeElement : null;
  const named = focus && (focus.id || focus.getAttribute("href"));
  return () => {
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    for (const one of part.querySelectorAll(".scroll")) {
      const old = moved.find(([label]) => label === one.ariaLabel);
      if (old) [, one.scrollLeft, one.scrollTop] = old;
    }
    if (named) [...part.querySelectorAll("[id], a")].find(one => named === (one.id || one.getAttribute("href")))?.focus();
  };
}

async function refresh() {
  if (fetching) { again = true; return; }
  fetching = true;
  try {
    const answer = await fetch(location.href, {headers: {accept: "text/html"}});
    if (answer.redirected) { location.reload(); return; }
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const html = fresh.getElementById(part.id)?.innerHTML ?? "";
      const isTouched = part.querySelector("details[open] form :focus") || String(getSelection());
      if (html === served.get(part.id) || isTouched) continue;
      const restore = kept(part);
      part.innerHTML = html;
      served.set(part.id, html);
      restore();
    }
  } finally {
    fetching = false;
    if (again) { again = false; setTimeout(refresh, 500); }
  }
}

if (live) {
  const stream = new EventSource("/changes");
  stream.addEventListener("open", () => { live.textContent = "live"; });
  stream.addEventListener("error", () => { live.textContent = "not live: the service can't be reached"; });
  stream.addEventListener("changed", () => refresh().catch(() => { live.textContent = "not live"; }));
}
