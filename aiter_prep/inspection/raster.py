"""A picture as PNG, on light, with the font that Pillow brings."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

from aiter_prep.errors import AiterPrepError
from aiter_prep.inspection.picture import BOLD, COLOURS, SIZES, Box, Text
from aiter_prep.storage.jsontext import printable

if TYPE_CHECKING:
    from aiter_prep.inspection.picture import Picture

SCALE = 2  # pixels of the file for one of the picture, so that it is sharp where it is large
FINER = 4  # boxes are drawn so many times finer, so that thin ones keep their breadth
PIXELS_PER_INCH = 96
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def check_can_draw() -> None:
    """Check that PNG can be written.

    Raises:
        AiterPrepError: Pillow is not installed.
    """
    if importlib.util.find_spec("PIL") is None:
        raise AiterPrepError(
            "a PNG needs the package `pillow`, which is not installed",
            "pip install 'aiter-prep[plot]', or write .svg, which needs nothing",
        )


def png(picture: Picture) -> bytes:
    """Return a picture as PNG.

    Raises:
        AiterPrepError: Pillow is not installed.
    """
    check_can_draw()
    from PIL import Image, ImageDraw, ImageFont

    fine = SCALE * FINER
    width, height = round(picture.width), round(picture.height)
    image = Image.new("RGB", (width * fine, height * fine), _light("paper"))
    draw = ImageDraw.Draw(image)
    for box in (shape for shape in picture.shapes if isinstance(shape, Box)):
        left, upper = round(box.x * fine), round(box.y * fine)
        # the last pixel is drawn, too
        right, lower = round((box.x + box.width) * fine) - 1, round((box.y + box.height) * fine) - 1
        if left <= right and upper <= lower:
            draw.rectangle((left, upper, right, lower), _light(box.kind))
    image = image.reduce(FINER)
    draw = ImageDraw.Draw(image)
    fonts = {kind: ImageFont.load_default(pixels * SCALE) for kind, pixels in SIZES.items()}
    for text in (shape for shape in picture.shapes if isinstance(shape, Text)):
        draw.text(
            (text.x * SCALE, text.y * SCALE),
            printable(text.text),
            fill=_light(text.kind),
            font=fonts[text.kind],
            anchor=ANCHORS[text.anchor],
            stroke_width=0.5 if text.kind in BOLD else 0,
        )
    file = io.BytesIO()
    dpi = SCALE * PIXELS_PER_INCH
    image.save(file, "PNG", optimize=True, dpi=(dpi, dpi))
    return file.getvalue()


def _light(kind: str) -> str:
    return COLOURS[kind][0]
