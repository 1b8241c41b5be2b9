from pathlib import Path

import pytest
from PIL import Image

from cribo.apps.adapt.config import AdaptConfig
from cribo.apps.adapt.planning import record_options
from cribo.base.errors import ConfigError
from cribo.data import open_images
from cribo.features import BackboneSource


def test_other_images_of_equal_names_and_sizes_are_not_continued(tmp_path: Path) -> None:
    images, options = tmp_path / "images", tmp_path / "out" / "options.json"
    images.mkdir()
    options.parent.mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(images / f"{number}.bmp")
    config = AdaptConfig(str(images), BackboneSource("resnet18"))
    for _ in range(2):
        record_options(options, config, open_images(images))
    (images / "0.bmp").write_bytes((images / "0.bmp").read_bytes())  # a copy
    record_options(options, config, open_images(images))
    (images / "0.bmp").write_bytes((images / "1.bmp").read_bytes())
    with pytest.raises(ConfigError, match="--name"):
        record_options(options, config, open_images(images))
