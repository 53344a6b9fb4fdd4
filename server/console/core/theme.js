/* Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's theme holds. */

(() => {
  const NAME = "relaxserve.theme", THEMES = ["system", "light", "dark"];
  const root = document.documentElement;
  let theme = "system";
  try {
    theme = JSON.parse(localStorage.getItem(NAME)) ?? theme;
  } catch {
    // storage is forbidden, or holds something else
  }
  root.dataset.theme = THEMES.includes(theme) ? theme : "system";

  document.addEventListener("click", event => {
    if (!event.target.closest("[data-action=theme]")) return;
    root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
    try {
      localStorage.setItem(NAME, JSON.stringify(root.dataset.theme));
    } catch {
      // it lasts as long as the page
    }
  });
})();
