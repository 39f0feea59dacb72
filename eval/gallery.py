"""Samples to look at: a text file, or a PNG of pictures with prompt and reward."""

from pathlib import Path

from torch import Tensor


def write_samples(path: Path, prompts: list[str], completions: list, scores: list[float]) -> Path:
    """``path`` with .txt or .png, whichever the completions (strings or uint8 images [3, H, W]) ask for."""
    if isinstance(completions[0], str):
        path = path.with_suffix(".txt")
        rows = zip(prompts, completions, scores, strict=True)
        path.write_text("\n".join(f"[{score:.2f}] {prompt}\n       {text}\n" for prompt, text, score in rows))
        return path
    path = path.with_suffix(".png")
    try:
        grid(prompts, completions, scores).save(path)
    except ImportError:
        raise ImportError("sample pictures need pillow: pip install -r requirements.txt") from None
    return path


def grid(prompts: list[str], images: list[Tensor], scores: list[float], columns: int = 4):
    """A PIL picture: each image above its prompt and reward, framed green where the reward is above 1/2."""
    from PIL import Image, ImageDraw, ImageFont

    side, text, margin = max(144, images[0].shape[-1]), 46, 12
    rows = -(-len(images) // columns)
    sheet = Image.new(
        "RGB", (columns * (side + margin) + margin, rows * (side + text + margin) + margin), "white"
    )
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for i, (prompt, image, score) in enumerate(zip(prompts, images, scores, strict=True)):
        x = margin + i % columns * (side + margin)
        y = margin + i // columns * (side + text + margin)
        picture = Image.fromarray(image.permute(1, 2, 0).cpu().numpy())
        sheet.paste(picture.resize((side, side), Image.Resampling.NEAREST), (x, y))
        colour = (40, 150, 60) if score > 0.5 else (190, 60, 50)
        pen.rectangle((x - 2, y - 2, x + side + 1, y + side + 1), outline=colour, width=2)
        pen.multiline_text(
            (x, y + side + 4), f"{wrap(prompt, pen, font, side)}\n{score:.2f}", fill="black", font=font
        )
    return sheet


def wrap(text: str, pen, font, width: int, lines: int = 2) -> str:
    """At most ``lines`` lines of ``width`` pixels, the rest cut off with an ellipsis."""
    wrapped = [""]
    for word in text.split():
        longer = f"{wrapped[-1]} {word}".strip()
        if pen.textlength(longer, font=font) <= width or not wrapped[-1]:
            wrapped[-1] = longer
        else:
            wrapped.append(word)
    if len(wrapped) > lines:
        wrapped = [*wrapped[: lines - 1], wrapped[lines - 1] + " ..."]
    return "\n".join(wrapped)
