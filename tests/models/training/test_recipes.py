import pytest

from nlbench import registry
from nlbench.models.training.recipes import (
    Recipe,
    linear_regions_augmented,
    linear_regions_noisy_labels,
    linear_regions_vanilla,
    noisy_labels,
    vanilla,
)


def test_a_cosine_falls_to_nearly_zero():
    recipe = Recipe("r", 4, learning_rate=2.0, schedule="cosine")
    rates = [recipe.learning_rate_at(number, 0) for number in range(4)]
    assert rates == pytest.approx([2.0, 1 + 2**-0.5, 1.0, 1 - 2**-0.5])


@pytest.mark.parametrize(
    ("accuracy", "loss", "reached"), [(1.0, 0.05, True), (0.99, 0.05, False), (1.0, 0.1, False)]
)
def test_training_ends_when_every_threshold_is_reached(accuracy, loss, reached):
    recipe = Recipe("r", 4, until_train_accuracy=1.0, until_loss=0.1)
    assert recipe.thresholds_reached(loss, accuracy) is reached


def test_a_recipe_without_thresholds_never_ends_early():
    assert not vanilla.thresholds_reached(0.0, 1.0)


def test_the_linear_regions_recipes_match_the_paper():
    # M. Gamba et al., AISTATS 2022, appendix A: SGD, momentum 0.9, batches of 128, rate 0.1.
    for recipe in (linear_regions_vanilla, linear_regions_augmented, linear_regions_noisy_labels):
        assert recipe.optimizer == "sgd"
        assert (recipe.learning_rate, recipe.momentum, recipe.batch_size) == (0.1, 0.9, 128)
    assert linear_regions_vanilla.weight_decay == 0
    assert (linear_regions_augmented.shift, linear_regions_augmented.flip) == (4, True)
    assert linear_regions_augmented.weight_decay > 0
    assert linear_regions_noisy_labels.until_train_accuracy == 1.0
    assert linear_regions_noisy_labels.learning_rate_at(2, 0) == pytest.approx(0.1 * 0.95**2)
    assert noisy_labels.label_noise == 0.4


@pytest.mark.parametrize("name", list(registry.entries("recipes")))
def test_a_recipe_has_its_registered_name(name):
    if not registry.entries("recipes")[name].providers[0].startswith("nlbench "):
        pytest.skip("of a plugin")
    recipe = registry.load("recipes", name)
    assert recipe.name == name
    assert recipe.source.citation or recipe.source.equation.startswith("ours")
    assert registry.describe(registry.entries("recipes")[name])


def test_the_learning_rate_warms_up_then_decays():
    recipe = Recipe("r", 9, learning_rate=0.8, warmup_steps=4, decay=0.1, decay_every=3)
    assert [recipe.learning_rate_at(0, step) for step in range(5)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.8]
    )
    rates = [recipe.learning_rate_at(epoch, 100) for epoch in (2, 3, 5, 6)]
    assert rates == pytest.approx([0.8, 0.08, 0.08, 0.008])
