"""HTML in which nothing is HTML that is not said to be."""

from __future__ import annotations

from elastic3d.pages.markup import Html, block, join, tag


def test_what_is_not_html_is_escaped_once() -> None:
    """Texts, attributes, and what is joined; numbers with a point are short; what is None or False is left out."""
    made = tag("td", "<b>", tag("i", "&"), data_label='"<', width=1.25, x=2.0, title=None, hidden=False, open=True)
    assert made == '<td data-label="&quot;&lt;" width="1.2" x="2" open>&lt;b&gt;<i>&amp;</i></td>'
    assert join("<", Html("<br>"), 3) == "&lt;<br>3"
    assert tag("meta", charset="utf-8") == '<meta charset="utf-8">'


def test_text_of_others_does_not_steer() -> None:
    """No control character, also none that turns the direction of what follows; lines are kept where they are shown."""
    assert join("a\x1b[31m\u202eb\nc") == "a [31m b c"
    assert block("<a>\n b") == '<pre tabindex="0">&lt;a&gt;\n b</pre>'
