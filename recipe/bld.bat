@echo off
rem The parts of one output: bld.bat host. The work is build_parts.py's.
python "%RECIPE_DIR%\build_parts.py" %1 || exit /b 1
