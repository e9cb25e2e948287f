"""The ``nlbench train`` and ``nlbench linearize`` commands."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nlbench import registry
from nlbench.cli.common import (
    Interrupted,
    command_line,
    file_stem,
    note,
    parse_folder,
    show_run,
    split_names,
    split_subject_options,
    subject_options,
)
from nlbench.cli.parameters import (
    DataName,
    DatasetSettings,
    Device,
    MeasureSettings,
    ModelName,
    ProgressStyle,
    Seeds,
)
from nlbench.errors import NotFinite, RequestError
from nlbench.options import Option
from nlbench.parsers import (
    MAX_COUNT,
    MAX_LEARNING_RATE,
    MAX_TRAINING_SEED,
    MAX_WEIGHT,
    parse_seeds,
    unique,
)
from nlbench.signals import check_interruption

if TYPE_CHECKING:
    from .train import TrainingSummary
    from .training_request import TrainingRequest

Checkpoint = Annotated[
    Path, typer.Option(help="Checkpoint to write (.safetensors), or a folder for several seeds.")
]
RecipeName = Annotated[str, typer.Option(help="Registered recipe; auto: the model's default.")]
InitialWeights = Annotated[
    str, typer.Option(help="Initial weights: init, trained or a checkpoint's path.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        help=r"Seed for initialisation and shuffling. \[default: 0]", min=0, max=MAX_TRAINING_SEED
    ),
]
LabelNoise = Annotated[
    float | None,
    typer.Option(help="Fraction of training labels to change to another class.", min=0, max=1),
]
Epochs = Annotated[
    int | None, typer.Option(help="Number of epochs; overrides the recipe.", min=1, max=MAX_COUNT)
]
Optimizer = Annotated[str | None, typer.Option(help="sgd, adam or adamw; overrides the recipe.")]
LearningRate = Annotated[
    float | None,
    typer.Option(help="Learning rate; overrides the recipe.", min=0, max=MAX_LEARNING_RATE),
]
BatchSize = Annotated[
    int | None, typer.Option(help="Batch size; overrides the recipe.", min=1, max=MAX_COUNT)
]
TrainAccuracy = Annotated[
    float | None, typer.Option(help="Stop once this training accuracy is reached.", min=0, max=1)
]
Omega = Annotated[
    float | None,
    typer.Option(
        help="Weight of the penalty, for post-training and from-start.", min=0, max=MAX_WEIGHT
    ),
]
CheckpointInterval = Annotated[
    int, typer.Option(help="Keep a checkpoint every N epochs; 0: none.", min=0, max=MAX_COUNT)
]
CheckpointEpochs = Annotated[
    str, typer.Option(help="Keep checkpoints after these epochs (comma-separated).")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted training run.")]


def train(
    model: ModelName,
    out: Checkpoint,
    data: DataName = "digits",
    recipe: RecipeName = "auto",
    weights: InitialWeights = "init",
    seed: Seed = None,
    seeds: Seeds = None,
    label_noise: LabelNoise = None,
    epochs: Epochs = None,
    optimizer: Optimizer = None,
    learning_rate: LearningRate = None,
    batch_size: BatchSize = None,
    until_train_accuracy: TrainAccuracy = None,
    omega: Omega = None,
    checkpoint_every: CheckpointInterval = 0,
    checkpoint_epochs: CheckpointEpochs = "",
    resume: Resume = False,
    setting: DatasetSettings = None,
    device: Device = "auto",
    progress: ProgressStyle = "auto",
) -> None:
    """Train a model and write its weights as a checkpoint for --weights."""
    if seeds and seed is not None:
        raise RequestError("--seed and --seeds can't be combined")
    files = _files(out, model, parse_seeds(seeds) if seeds else (seed or 0,))
    keep_epochs: tuple[int, ...] = ()
    if checkpoint_epochs:
        option = Option(1, minimum=1, maximum=MAX_COUNT)
        keep_epochs = _parse_numbers(checkpoint_epochs, "--checkpoint-epochs", option)
    arguments, options = subject_options(setting or [], model, data)
    changes = _drop_none(
        epochs=epochs,
        optimizer=optimizer,
        learning_rate=learning_rate,
        batch_size=batch_size,
        until_train_accuracy=until_train_accuracy,
        omega=omega,
    )
    command = command_line()
    from nlbench.progress import create_progress

    results: dict[Path, TrainingSummary | None] = {}
    with create_progress(progress) as bar:
        bar.show_status("loading")
        from .training_request import TrainingRequest, load_recipe, resolve_recipe

        recipe = resolve_recipe(model, recipe)
        # All requests are checked before the first network is trained.
        base = TrainingRequest(
            model, data, recipe, 0, weights, label_noise, changes, options, device, arguments
        )
        requests = {file: replace(base, seed=number) for number, file in files.items()}
        last = max(load_recipe(request).epochs for request in requests.values())
        if late := [epoch for epoch in sorted(keep_epochs) if epoch > last]:
            raise RequestError(f"--checkpoint-epochs: {late[0]} is beyond the last epoch, {last}")
        keep = {"keep_epochs": keep_epochs, "keep_every": checkpoint_every}
        for file, request in requests.items():
            bar.begin(last)
            results[file] = _train(request, file, bar, command, resume=resume, **keep)
    print(f"recipe          {recipe}")
    for file, result in results.items():
        if result is None:
            continue
        print(f"train accuracy  {result.train_accuracy:.2%}")
        print(f"test accuracy   {result.test_accuracy:.2%}")
        for name, value in result.scores.items():
            print(f"{name.ljust(15)} {value:.4g}")
        print(f"weights         {file}")
        if not result.is_reached:
            print(f"the threshold was not reached within {result.epochs} epochs")
    if not all(result is not None and result.is_reached for result in results.values()):
        raise typer.Exit(1)


def _drop_none(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _train(
    request: "TrainingRequest", file: Path, bar: Any, command: str, *, resume: bool, **keep: Any
) -> "TrainingSummary | None":
    """Train one network. If it diverges, print a note and return None."""
    from .train import run_training

    def step(epoch: Any) -> None:
        bar.step(
            f"{request.model} seed {request.seed}: loss {epoch.loss:.3f}, "
            f"test accuracy {epoch.test_accuracy:.1%}"
        )

    try:
        return run_training(request, file, resume=resume, progress=step, command=command, **keep)
    except NotFinite as error:
        bar.stop()
        note(f"{file.name}: {error}")
        return None
    except KeyboardInterrupt:
        from nlbench.subjects.weights_choice import training_folder

        folder = training_folder(file)
        status = (
            f"finished epochs are in {folder}"
            if (folder / "state").exists()
            else f"no epoch of {file.name} has been completed"
        )
        resume_command = command if resume else f"{command} --resume"
        raise Interrupted(status, resume_command) from None


def _files(out: Path, model: str, seeds: tuple[int, ...]) -> dict[int, Path]:
    if len(seeds) == 1 and out.suffix == ".safetensors":
        return {seeds[0]: out}
    if len(seeds) == 1:
        raise RequestError(f"--out: expected a name ending in .safetensors, got '{out}'")
    if out.suffix == ".safetensors":
        raise RequestError(f"--out: expected a folder for {len(seeds)} seeds, got '{out}'")
    return {seed: out / f"{file_stem(model)}-seed{seed}.safetensors" for seed in seeds}


def _parse_numbers(text: str, label: str, option: Option) -> tuple[Any, ...]:
    """Parse comma-separated numbers, without repetitions."""
    numbers = (option.parse(part, label) for part in split_names([text], label))
    return tuple(unique(numbers))


RunFolderName = Annotated[str, typer.Option(help="Folder for the run and its checkpoints.")]
TrainedWeights = Annotated[
    str,
    typer.Option(
        help="trained or a checkpoint's path; auto: the bundled trained weights if there are any, "
        "otherwise one training run per seed."
    ),
]
Omegas = Annotated[str, typer.Option(help="Weights of the penalty (comma-separated).")]
FromStart = Annotated[
    bool,
    typer.Option(
        "--from-start/--post-training",
        help="Train with the penalty from the initialisation, or from trained weights.",
    ),
]
Control = Annotated[
    str, typer.Option(help="random: add a control with as many linear units, drawn at random.")
]
Layerwise = Annotated[
    bool, typer.Option("--layerwise", help="Use one slope per layer, not per channel.")
]
BaseRecipe = Annotated[
    str, typer.Option(help="Recipe for networks to train first; auto: the model's default.")
]
SlopeRate = Annotated[
    float | None,
    typer.Option(
        help="Learning rate of the slopes relative to that of the weights.", min=0, max=MAX_WEIGHT
    ),
]
Report = Annotated[bool, typer.Option(help="Write report.html into the run's folder.")]


def linearize(
    model: ModelName,
    out: RunFolderName,
    data: DataName = "digits",
    weights: TrainedWeights = "auto",
    omega: Omegas = "0,0.0003,0.001,0.003,0.01",
    seeds: Seeds = None,
    from_start: FromStart = False,
    control: Control = "",
    layerwise: Layerwise = False,
    base_recipe: BaseRecipe = "auto",
    epochs: Epochs = None,
    learning_rate: LearningRate = None,
    slope_rate: SlopeRate = None,
    setting: MeasureSettings = None,
    device: Device = "auto",
    progress: ProgressStyle = "auto",
    report: Report = True,
) -> None:
    """Linearise a network's units with a sparsity penalty and measure the remaining depth.

    To resume an interrupted run, repeat the command.
    """
    if control not in ("", "random"):
        raise RequestError(f"--control: expected random, got '{control}'")
    folder = parse_folder(out)
    arguments, options, settings = split_subject_options(setting or [], model, data)
    changes = _drop_none(epochs=epochs, learning_rate=learning_rate, slope_rate=slope_rate)
    omegas = _parse_numbers(omega, "--omega", Option(0.0, minimum=0, maximum=MAX_WEIGHT))
    seed_numbers = parse_seeds(seeds or ["0"])
    for group, name in (("models", model), ("datasets", data), ("recipes", base_recipe)):
        if (group, name) != ("recipes", "auto"):
            registry.expand(group, [name])
    command = command_line()
    from nlbench.progress import create_progress

    with create_progress(progress) as bar:
        bar.show_status("loading")
        from .linearise import LinearisationRequest, linearise
        from .training_request import TrainingRequest, resolve_recipe

        recipe = "from-start" if from_start else "post-training"
        changes["layerwise"] = layerwise
        training = TrainingRequest(
            model, data, recipe, 0, weights, None, changes, options, device, arguments
        )
        base_recipe = resolve_recipe(model, base_recipe)
        request = LinearisationRequest(
            training, base_recipe, omegas, seed_numbers, control=bool(control)
        )
        try:
            run = linearise(request, folder, settings=settings, progress=bar, command=command)
            bar.stop()
            show_run(run, report, checkpoints=folder / "checkpoints")
            check_interruption()
        except NotFinite as error:
            note(str(error))
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            has_started = (folder / "checkpoints").is_dir()
            done = f"finished networks are in {folder}"
            status = done if has_started else "nothing has been trained yet"
            raise Interrupted(status, command) from None
    # The cells of networks that couldn't be trained are recorded as skipped.
    if run.failed or any(record.result.status == "skipped" for record in run.records):
        raise typer.Exit(1)
