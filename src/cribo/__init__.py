"""Dense visual representations from unlabelled images by cross-image object-level bootstrapping (CrIBo)."""

# This module imports nothing by itself, not even typing: Ctrl-C while the command `cribo` imports it would print a
# traceback, since the command cannot handle it yet.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from cribo.apps.adapt import AdaptConfig as AdaptConfig
    from cribo.apps.adapt import DistillConfig as DistillConfig
    from cribo.apps.adapt import adapt as adapt
    from cribo.apps.adapt import distill as distill
    from cribo.apps.studies import run_study as run_study
    from cribo.evaluation import evaluate as evaluate
    from cribo.features.memory import SegmentationMemory as SegmentationMemory
    from cribo.models import load_backbone as load_backbone
    from cribo.pretraining import load_config as load_config
    from cribo.pretraining import pretrain as pretrain
    from cribo.pretraining import resume as resume

    __version__: str
else:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version("cribo-ssl")
        if name.startswith("__") and name != "__all__":  # looked up by the import system
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from cribo.base.lazy import lazy_names

        get, names = lazy_names(__name__)
        return [*names, "__version__"] if name == "__all__" else get(name)
