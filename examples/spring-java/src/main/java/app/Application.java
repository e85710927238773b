package app;

import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.PostMapping;
import org.springframework.web.bind.annotation.RequestBody;
import org.springframework.web.bind.annotation.RequestParam;
import org.springframework.web.bind.annotation.RestController;

/** A Spring Boot web application: greets, and counts words. */
@SpringBootApplication
@RestController
public class Application {
    record Count(String word, long times) {}

    public static void main(String[] arguments) {
        SpringApplication.run(Application.class, arguments);
    }

    @GetMapping("/")
    Map<String, String> greet(@RequestParam(defaultValue = "you") String name) {
        return Map.of("greeting", "Hello from Spring, " + name + "!");
    }

    @PostMapping("/words")
    List<Count> words(@RequestBody String text) {
        return Stream.of(text.toLowerCase().split("\\W+"))
                .filter(word -> !word.isEmpty())
                .collect(Collectors.groupingBy(Function.identity(), Collectors.counting()))
                .entrySet().stream()
                .map(entry -> new Count(entry.getKey(), entry.getValue()))
                .sorted(Comparator.comparing(Count::times).reversed().thenComparing(Count::word))
                .limit(3)
                .toList();
    }
}
