"""The web page of `cribo explore`; the modules here do not depend on Gradio, except `page`, `server` and `tabs`."""
