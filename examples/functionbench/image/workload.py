"""Image processing with Pillow: flips, turns, filters, shrinks, encodes."""

import io

from PIL import Image, ImageFilter, ImageOps

Image.init()
PICTURE = Image.merge(
    "RGB",
    [
        Image.radial_gradient("L").resize((800, 600)),
        Image.linear_gradient("L").resize((800, 600)),
        Image.linear_gradient("L").rotate(90).resize((800, 600)),
    ],
)


def run(size=128):
    made = {
        "flipped": ImageOps.flip(PICTURE),
        "turned": PICTURE.rotate(90, expand=True),
        "blurred": PICTURE.filter(ImageFilter.GaussianBlur(2)),
        "contours": PICTURE.filter(ImageFilter.CONTOUR),
        "gray": PICTURE.convert("L"),
        "small": ImageOps.contain(PICTURE, (size, size)),
    }
    result = {}
    for name, image in made.items():
        encoded = io.BytesIO()
        image.save(encoded, "JPEG")
        result[name] = [*image.size, encoded.tell()]
    return result
