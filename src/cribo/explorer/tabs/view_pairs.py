"""The tab of view pairs and their clusters."""

from typing import TYPE_CHECKING, Any

import gradio as gr

from cribo.explorer.tabs.fields import HIDDEN, REQUEST, show_errors, shown_picture, whole_number

if TYPE_CHECKING:
    from cribo.explorer.view_pairs import PairSample


def view_pairs_tab(tab: gr.Tab, pairs: "PairSample") -> None:
    """Add two views above their clusters, and buttons for the previous and next pair."""

    @show_errors
    def show(number: Any) -> tuple[Any, ...]:
        place, picture = pairs.picture(whole_number(number))
        return place, picture.sentence, *picture.views, *picture.clusters

    def moved(by: int) -> Any:
        return show_errors(lambda number: show(whole_number(number) + by))

    description = gr.Markdown("Views are sampled and clustered when this tab is first opened.")
    with gr.Row():
        number = gr.Number(0, label="Pair", precision=0, minimum=0, min_width=110)
        before = gr.Button("← previous pair", min_width=110)
        after = gr.Button("next pair →", min_width=110)
    with gr.Row(equal_height=False):
        with gr.Column(min_width=280):
            views = [shown_picture("View 1", "View 1 of the pair")]
            clusters = [shown_picture("Its clusters", "Clusters of view 1")]
        with gr.Column(min_width=280):
            views.append(shown_picture("View 2", "View 2 of the pair"))
            clusters.append(shown_picture("Its clusters", "Clusters of view 2"))
    shown = [number, description, *views, *clusters]
    tab.select(show, number, shown, **HIDDEN)
    gr.on([number.submit, number.blur], show, number, shown, api_name="view_pair", **REQUEST)
    before.click(moved(-1), number, shown, **HIDDEN)
    after.click(moved(1), number, shown, **HIDDEN)
