"""The browser of the tests names what a page does wrong."""


def test_a_visit_tells_errors_and_requests(visit, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<h1>title</h1><img src='http://127.0.0.1:9/a.png'><script>missing()</script>")
    visited = visit(page)
    assert visited.page.inner_text("h1") == "title"
    assert visited.requests == ["http://127.0.0.1:9/a.png"]
    assert any("missing is not defined" in error for error in visited.errors)
