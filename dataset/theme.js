"use strict";

// Light or dark: as in the system's settings, unless the user has chosen.
{
  const root = document.documentElement;
  const remembered = (action) => { try { return action(localStorage); } catch { return null; } }; // some browsers have no storage
  const chosen = remembered((store) => store.getItem("theme"));
  if (chosen) root.dataset.theme = chosen;
  document.querySelector(".theme").addEventListener("click", () => {
    const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : isSystemDark;
    root.dataset.theme = isDark ? "light" : "dark";
    remembered((store) => store.setItem("theme", root.dataset.theme));
  });
}
