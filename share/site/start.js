// Starts the page, or shows why it cannot start.

const notice = document.getElementById("notice");
const tell = (text) => { notice.textContent = text; notice.hidden = false; };
addEventListener("unhandledrejection", ({ reason }) => tell(`This went wrong: ${reason?.message ?? reason}`));
if (location.protocol === "file:") {
  tell("A browser runs this page only from a web server: python -m http.server --directory FOLDER 8000, "
    + "FOLDER being where this file is; then open http://localhost:8000");
} else {
  import("./page.js");
}
