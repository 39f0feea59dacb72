"""What GenEval looks with: Mask2Former finds the objects, CLIP names their colours.

The benchmark ran another checkpoint of the same architecture (mmdetection's, Swin-S, COCO) on larger
pictures, so our scores may differ from published ones.
"""

import torch
from torch import Tensor

from eval.geneval_rule import CLASSES, COLORS, Detection, keep
from eval.reward_model import pil_images, pretrained, pretrained_model, refuse_misfits

DETECTOR = "facebook/mask2former-swin-small-coco-instance"
CLIP = "openai/clip-vit-large-patch14"
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)


class Mask2Former:
    """A transformers checkpoint trained on COCO's 80 classes; ``detector(images) -> detections of each``.

    Raises ImportError without scipy, ValueError for weights that cannot be loaded or do not fit.
    """

    def __init__(self, path: str = DETECTOR, device: str = "cpu"):
        try:
            import scipy  # noqa: F401  Mask2Former does not start without it
        except ImportError:
            raise ImportError("GenEval's detector needs scipy: pip install -r requirements.txt") from None
        from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

        self.processor = pretrained(AutoImageProcessor, path, backend="pil")
        model, info = pretrained(
            Mask2FormerForUniversalSegmentation,
            path,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
        # A weight too many changes nothing; a missing one (but the loss's) is random, and nothing is found.
        missing = [key for key in info["missing_keys"] if not key.startswith("criterion.")]
        refuse_misfits(path, missing, (), [key for key, *_ in info["mismatched_keys"]])
        if model.config.num_labels != len(CLASSES):
            raise ValueError(f"{path}: {model.config.num_labels} classes, not the 80 of COCO")
        self.model, self.device = model.to(device).eval(), device

    @torch.no_grad()
    def __call__(self, images: list[Tensor], threshold: float = 0.0) -> list[list[Detection]]:
        """Detections with a score over ``threshold`` in each uint8 picture [3, H, W].

        Boxes surround the masks and end one pixel past them, as mmdetection's do.
        """
        pixels = self.processor(images=pil_images(images), return_tensors="pt")
        out = self.model(pixel_values=pixels["pixel_values"].to(self.device))
        # Post-processing makes its maps on the CPU, so all of it has to happen there.
        out.class_queries_logits = out.class_queries_logits.float().cpu()
        out.masks_queries_logits = out.masks_queries_logits.float().cpu()
        results = self.processor.post_process_instance_segmentation(
            out, threshold=0, return_binary_maps=True, target_sizes=[tuple(i.shape[1:]) for i in images]
        )
        return [
            [
                Detection(CLASSES[found["label_id"]], found["score"], _box(mask), mask.bool().numpy())
                for found, mask in zip(result["segments_info"], result["segmentation"], strict=False)
                if found["score"] > threshold
            ]
            for result in results
        ]


def _box(mask: Tensor) -> tuple[float, float, float, float]:
    rows, columns = mask.any(1).nonzero().flatten().tolist(), mask.any(0).nonzero().flatten().tolist()
    return columns[0], rows[0], columns[-1] + 1, rows[-1] + 1


class ClipColors:
    """Zero-shot colour of objects: ``colors(image, detections of one class) -> names out of COLORS``.

    Raises ValueError for weights that cannot be loaded or do not fit.
    """

    def __init__(self, path: str = CLIP, device: str = "cpu"):
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        self.processor = pretrained(AutoImageProcessor, path, backend="pil")
        self.tokenizer = pretrained(AutoTokenizer, path)
        self.model, self.device = pretrained_model(CLIPModel, path).to(device), device
        self._texts: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, image: Tensor, detections: list[Detection]) -> list[str]:
        crops = self.processor(images=[crop(image, d) for d in detections], return_tensors="pt")
        z = self.model.get_image_features(pixel_values=crops["pixel_values"].to(self.device)).pooler_output
        similarity = z @ self._colors_of(detections[0].name).T  # [n, 10]; the length of z changes no order
        return [COLORS[i] for i in similarity.argmax(1).tolist()]

    def _colors_of(self, name: str) -> Tensor:
        """[10, d], a unit vector for each colour: the mean of its templates' unit vectors."""
        if name not in self._texts:
            texts = [t.format(color=color, name=name) for color in COLORS for t in TEMPLATES]
            tokens = self.tokenizer(texts, padding=True, return_tensors="pt").to(self.device)
            z = torch.nn.functional.normalize(self.model.get_text_features(**tokens).pooler_output, dim=1)
            z = z.view(len(COLORS), len(TEMPLATES), -1).mean(1)
            self._texts[name] = torch.nn.functional.normalize(z, dim=1)
        return self._texts[name]


def crop(image: Tensor, detection: Detection):
    """The box of an object as a PIL picture, everything outside of its mask painted #999."""
    from PIL import Image

    [picture] = pil_images([image])
    if detection.mask is not None:
        picture = Image.composite(
            picture, Image.new("RGB", picture.size, "#999"), Image.fromarray(detection.mask)
        )
    return picture.crop(detection.box)


def sanity_pictures() -> dict[str, Tensor]:
    """Two drawings that a detector trained on COCO should know, by class: uint8 [3, 512, 512]."""
    import math

    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    def polygon(n, radius, turn, x=256, y=256):
        angles = [2 * math.pi * (i + turn) / n for i in range(n)]
        return [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles]

    stop = Image.new("RGB", (512, 512), "#a9cbe8")
    draw = ImageDraw.Draw(stop)
    draw.rectangle((0, 420, 512, 512), fill="#6f8f4e")
    draw.rectangle((247, 300, 265, 490), fill="#8a8d90")
    draw.polygon(polygon(8, 165, 0.5, y=200), fill="white")
    draw.polygon(polygon(8, 153, 0.5, y=200), fill="#c1121f")
    draw.text((256, 200), "STOP", fill="white", font=ImageFont.load_default(96), anchor="mm", stroke_width=3)

    clock = Image.new("RGB", (512, 512), "#d9cbb3")
    draw = ImageDraw.Draw(clock)
    draw.ellipse((70, 70, 442, 442), fill="#3b2a1e")
    draw.ellipse((88, 88, 424, 424), fill="white")
    for hour, at in zip([3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2], polygon(12, 138, 0), strict=True):
        draw.text(at, str(hour), fill="black", font=ImageFont.load_default(36), anchor="mm")
    draw.line((256, 256, 186, 216), fill="black", width=13)  # ten past ten
    draw.line((256, 256, 352, 201), fill="black", width=8)
    draw.ellipse((246, 246, 266, 266), fill="black")
    drawn = {"stop sign": stop, "clock": clock}
    return {name: torch.from_numpy(np.array(picture)).permute(2, 0, 1) for name, picture in drawn.items()}


def check_sanity(detector) -> None:
    """Stops (SystemExit) unless the detector finds, by the benchmark's threshold, what our two drawings show.

    A detector whose weights were loaded wrongly runs without an error and scores fine pictures 0 to 3 %.
    """
    for name, picture in sanity_pictures().items():
        kept = keep(detector([picture])[0], "single_object")
        if name not in kept:
            seen = ", ".join(f"{n} {d[0].score:.2f}" for n, d in kept.items()) or "nothing"
            raise SystemExit(
                f"geneval: sanity pictures failed: the detector sees {seen} where a {name} is drawn, "
                f"so nothing is scored; check its weights and the version of transformers"
            )
