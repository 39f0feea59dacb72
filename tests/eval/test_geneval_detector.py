"""GenEval's eyes: tiny random models of the released architectures, exact checks of what surrounds them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_rewards import redraw, save_tokenizer

from eval.geneval_detector import (
    ClipColors,
    Mask2Former,
    check_sanity,
    crop,
    sanity_pictures,
)
from eval.geneval_rule import CLASSES, COLORS, Detection


@pytest.fixture(scope="module")
def detector_path(tmp_path_factory):
    """A random Mask2Former on Swin with 80 classes, 115,000 weights."""
    pytest.importorskip("scipy")
    from transformers import (
        Mask2FormerConfig,
        Mask2FormerForUniversalSegmentation,
        Mask2FormerImageProcessorPil,
        SwinConfig,
    )

    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = SwinConfig(
        image_size=32, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2], window_size=2, out_features=stages
    )
    sizes = dict.fromkeys(("hidden_dim", "feature_size", "mask_feature_size"), 32)
    layers = dict(encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=10)
    widths = dict(encoder_feedforward_dim=16, dim_feedforward=16)
    config = Mask2FormerConfig(backbone_config=backbone, num_labels=80, **sizes, **layers, **widths)
    path = tmp_path_factory.mktemp("mask2former")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Mask2FormerForUniversalSegmentation(config).save_pretrained(path)
    Mask2FormerImageProcessorPil(size={"height": 64, "width": 64}, ignore_index=255).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def clip_path(tmp_path_factory):
    """A random CLIP with as many text positions as the released one."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    path = tmp_path_factory.mktemp("clip")
    save_tokenizer(path, ends=True)
    width = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    text = dict(vocab_size=263, max_position_embeddings=77, eos_token_id=256)
    vision = dict(image_size=32, patch_size=8)
    config = CLIPConfig(text_config=width | text, vision_config=width | vision, projection_dim=8)
    redraw(CLIPModel(config)).save_pretrained(path)
    pixels = {"height": 32, "width": 32}
    CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=pixels).save_pretrained(path)
    return path


def pictures(n, height=80, width=96):
    return list(
        torch.randint(0, 256, (n, 3, height, width), generator=torch.Generator().manual_seed(n)).byte()
    )


def test_detections_have_coco_classes_and_boxes_around_their_masks(detector_path):
    [found] = Mask2Former(str(detector_path))(pictures(1))
    assert 0 < len(found) <= 10
    for d in found:
        assert d.name in CLASSES and 0 <= d.score <= 1
        assert d.mask.shape == (80, 96) and d.mask.dtype == bool
        x1, y1, x2, y2 = d.box
        inside = np.zeros_like(d.mask)
        inside[y1:y2, x1:x2] = True
        assert not (d.mask & ~inside).any()
        edges = d.mask[y1, x1:x2], d.mask[y2 - 1, x1:x2], d.mask[y1:y2, x1], d.mask[y1:y2, x2 - 1]
        assert all(edge.any() for edge in edges)


def test_a_list_of_pictures_gives_what_each_gives_alone(detector_path):
    detector = Mask2Former(str(detector_path))
    images = [*pictures(2), *pictures(1, 60, 60)]
    for together, image in zip(detector(images), images, strict=True):
        [alone] = detector([image])
        assert [d.name for d in together] == [d.name for d in alone]
        np.testing.assert_allclose([d.score for d in together], [d.score for d in alone], atol=2e-6)
        assert np.mean([np.mean(a.mask != b.mask) for a, b in zip(together, alone, strict=True)]) < 1e-3


def test_detections_under_the_threshold_are_left_out(detector_path):
    detector = Mask2Former(str(detector_path))
    [found] = detector(pictures(1))
    middle = sorted(d.score for d in found)[len(found) // 2]
    assert 0 < len(detector(pictures(1), middle)[0]) == sum(d.score > middle for d in found) < len(found)


def test_weights_that_do_not_fit_are_refused_by_name(detector_path, tmp_path):
    """Report L1: a detector with missing weights loads with only warnings."""
    from safetensors.torch import load_file, save_file

    for file in detector_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    del state["class_predictor.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="class_predictor.weight"):
        Mask2Former(str(tmp_path))


def test_a_detector_of_other_classes_is_refused(detector_path, tmp_path):
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    config = Mask2FormerConfig.from_pretrained(detector_path)
    config.num_labels = 7
    Mask2FormerForUniversalSegmentation(config).save_pretrained(tmp_path)
    processor = (detector_path / "preprocessor_config.json").read_text()
    (tmp_path / "preprocessor_config.json").write_text(processor)
    with pytest.raises(ValueError, match="7 classes, not the 80 of COCO"):
        Mask2Former(str(tmp_path))


def test_an_absent_checkpoint_is_one_sentence(tmp_path):
    pytest.importorskip("scipy")
    with pytest.raises(ValueError, match="can be loaded"):
        Mask2Former(str(tmp_path))
    with pytest.raises(ValueError, match="can be loaded"):
        ClipColors(str(tmp_path))


def painted():
    """A picture of twelve patches of one colour each, and the detections of these."""
    noise = torch.randint(0, 256, (3, 3, 4), generator=torch.Generator().manual_seed(0))
    image = noise.repeat_interleave(20, 1).repeat_interleave(24, 2).byte()
    corners = [(24 * x, 20 * y) for y in range(3) for x in range(4)]
    return image, [Detection("cup", 0.9, (x, y, x + 24, y + 20)) for x, y in corners]


def test_colours_of_several_objects_are_those_of_each_alone(clip_path):
    colors, (image, cups) = ClipColors(str(clip_path)), painted()
    together = colors(image, cups)
    assert together == [colors(image, [d])[0] for d in cups]
    assert len(set(together)) > 1 and set(together) <= set(COLORS)


def test_colour_is_the_nearest_mean_of_three_captions(clip_path):
    """Spelled out: unit vectors, mean over templates, unit again, largest cosine."""
    colors, (image, cups) = ClipColors(str(clip_path)), painted()
    captions = "a photo of a {c} tv remote", "a photo of a {c}-colored tv remote", "a photo of a {c} object"
    anchors = []
    for color in COLORS:
        tokens = [colors.tokenizer(c.format(c=color), return_tensors="pt") for c in captions]
        with torch.no_grad():
            vectors = [colors.model.get_text_features(**t).pooler_output[0] for t in tokens]
        anchors.append(torch.stack([v / v.norm() for v in vectors]).mean(0))
    anchors = torch.stack([a / a.norm() for a in anchors])
    torch.testing.assert_close(colors._colors_of("tv remote"), anchors, atol=1e-5, rtol=0)
    remotes = [replace(cup, name="tv remote") for cup in cups]
    for remote, color in zip(remotes, colors(image, remotes), strict=True):
        pixels = colors.processor([crop(image, remote)], return_tensors="pt")["pixel_values"]
        with torch.no_grad():
            z = colors.model.get_image_features(pixel_values=pixels).pooler_output[0]
        assert color == COLORS[torch.cosine_similarity(anchors, z[None]).argmax()]


def test_crop_paints_what_is_not_the_object_grey():
    image = torch.zeros(3, 20, 30, dtype=torch.uint8)
    image[0] = 255
    mask = np.zeros((20, 30), bool)
    mask[5:10, 8:20] = True
    mask[5, 8] = False
    seen = np.asarray(crop(image, Detection("cup", 0.9, (8, 5, 20, 10), mask)))
    assert seen.shape == (5, 12, 3)
    assert seen[0, 0].tolist() == [0x99] * 3
    assert (seen.reshape(-1, 3)[1:] == [255, 0, 0]).all()
    assert (np.asarray(crop(image, Detection("cup", 0.9, (0, 0, 30, 20)))) == [255, 0, 0]).all()


def test_sanity_pictures_failed_stops_when_the_detector_finds_nothing():
    """Report L1."""
    with pytest.raises(
        SystemExit, match="sanity pictures failed: the detector sees nothing where a stop sign"
    ):
        check_sanity(lambda images: [[] for _ in images])


def test_sanity_needs_both_pictures_by_the_benchmarks_threshold():
    """Report L1: a detector that calls everything a stop sign, or is unsure, is not let through."""
    box = (0, 0, 9, 9)
    with pytest.raises(SystemExit, match="sees stop sign 0.90 where a clock is drawn"):
        check_sanity(lambda images: [[Detection("stop sign", 0.9, box)]])
    both = [Detection("stop sign", 0.31, box), Detection("clock", 0.31, box)]
    check_sanity(lambda images: [both])
    with pytest.raises(SystemExit):
        check_sanity(lambda images: [[Detection(d.name, 0.29, box) for d in both]])


def test_sanity_pictures_are_two_different_drawings_with_many_colours():
    stop, clock = sanity_pictures().values()
    for picture in (stop, clock):
        assert picture.shape == (3, 512, 512) and picture.dtype == torch.uint8
    red = (stop[0] > 150) & (stop[1] < 60)
    assert 0.15 < red.float().mean() < 0.5
    white = (clock > 240).all(0)
    assert 0.2 < white.float().mean() < 0.6


def test_the_released_layout_is_what_the_tiny_checkpoint_has(detector_path):
    """Names as in facebook/mask2former-swin-*: transformers 5 renames Swin's weights as it reads them."""
    from safetensors import safe_open

    with safe_open(detector_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    block = "model.pixel_level_module.encoder.encoder.layers.0.blocks.0.attention"
    assert {f"{block}.self.query.weight", f"{block}.self.relative_position_bias_table"} <= names
    assert json.loads((detector_path / "config.json").read_text())["model_type"] == "mask2former"
