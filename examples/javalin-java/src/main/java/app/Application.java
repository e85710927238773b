package app;

import io.javalin.Javalin;
import io.javalin.http.Context;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.DoubleSummaryStatistics;
import java.util.Map;

/** A Javalin application: greets, keeps notes in files, computes, echoes. */
public class Application {
    record Statistics(long count, double minimum, double maximum, double mean) {}

    public static void main(String[] arguments) throws IOException {
        Path notes = Files.createTempDirectory("notes");
        Javalin.create()
                .get("/", Application::greet)
                .put("/notes/{name}", context -> {
                    Files.write(note(notes, context), context.bodyAsBytes());
                    context.status(201);
                })
                .get("/notes/{name}", context ->
                        context.result(Files.readAllBytes(note(notes, context))))
                .post("/statistics", Application::statistics)
                .ws("/echo", socket -> socket.onMessage(message ->
                        message.send("echo: " + message.message())))
                .start(8080);
    }

    private static void greet(Context context) {
        String name = context.queryParam("name");
        context.json(Map.of("greeting", "Hello from Javalin, " + (name == null ? "you" : name) + "!"));
    }

    private static Path note(Path notes, Context context) {
        return notes.resolve(Path.of(context.pathParam("name")).getFileName());
    }

    private static void statistics(Context context) {
        double[] values = context.bodyAsClass(double[].class);
        DoubleSummaryStatistics found = Arrays.stream(values).parallel().summaryStatistics();
        context.json(new Statistics(
                found.getCount(), found.getMin(), found.getMax(), found.getAverage()));
    }
}
