"use strict";

// Light and dark: as the system has it, until a person says otherwise.
{
  const root = document.documentElement;
  const remembered = (action) => { try { return action(localStorage); } catch { return null; } }; // some keep nothing
  const chosen = remembered((store) => store.getItem("theme"));
  if (chosen) root.dataset.theme = chosen;
  document.querySelector(".theme").addEventListener("click", () => {
    const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : isSystemDark;
    root.dataset.theme = isDark ? "light" : "dark";
    remembered((store) => store.setItem("theme", root.dataset.theme));
  });
}
